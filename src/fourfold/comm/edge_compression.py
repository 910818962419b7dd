"""Compression of edges: what a message of activations becomes before it is sent, and what both ends remember of it.

message  the specs of its tensors as int64 words, then the parts of each; of gradients the parts alone
parts    what travels of a tensor: several tensors, each with its own dtype
mask     of dct, bool, in the tensor's shape: which elements were sent. Both ends know it, so a gradient is its values
kept     what both ends know of the tensors that need a gradient, until it is sent: their specs and masks
Law: both ends keep the same. Without compression a message is its tensors; else `decode(encode(x))` is what the next
stage computes with, and a gradient is rounded alike, or has the same mask. What is not finite arrives as not finite,
and is seen in the loss.

R rows · C columns · K kept elements

Source: Gupta et al. (2021), Alg. 2, a threshold for each row. Error feedback would need the same samples again: none.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.axes.pipeline.rules.edges import EdgeSpec, uses_indices
from fourfold.comm.edges import TensorSpec, decode, encode, specs
from fourfold.plan.codec import num_sent

# ---- formats of tensors on an edge ---------------------------------------------------------------------------------

MAX_CODE = 127


class Coded(NamedTuple):
    """What travels of a tensor, and its mask if it has one."""

    parts: list[Tensor]
    mask: Tensor | None = None


class Decoded(NamedTuple):
    """What has arrived of a tensor, and its mask if it has one."""

    tensor: Tensor
    mask: Tensor | None = None


class TensorFormat(Protocol):
    """How one tensor travels, and its gradient."""

    num_forward_parts: int
    num_backward_parts: int

    def encode(self, tensor: Tensor) -> Coded: ...

    def decode(self, parts: Sequence[Tensor], spec: TensorSpec) -> Decoded: ...

    def encode_gradient(self, gradient: Tensor, mask: Tensor | None) -> list[Tensor]: ...

    def decode_gradient(self, parts: Sequence[Tensor], spec: TensorSpec, mask: Tensor | None) -> Tensor: ...


class Unchanged:
    """A tensor as it is."""

    num_forward_parts = num_backward_parts = 1

    def encode(self, tensor: Tensor) -> Coded:
        return Coded([tensor])

    def decode(self, parts: Sequence[Tensor], spec: TensorSpec) -> Decoded:
        return Decoded(parts[0])

    def encode_gradient(self, gradient: Tensor, mask: Tensor | None) -> list[Tensor]:
        return [gradient]

    def decode_gradient(self, parts: Sequence[Tensor], spec: TensorSpec, mask: Tensor | None) -> Tensor:
        return parts[0]


class Bfloat16:
    """Every element in two bytes."""

    num_forward_parts = num_backward_parts = 1

    def encode(self, tensor: Tensor) -> Coded:
        return Coded([tensor.to(torch.bfloat16)])

    def decode(self, parts: Sequence[Tensor], spec: TensorSpec) -> Decoded:
        return Decoded(parts[0].to(spec.dtype))

    def encode_gradient(self, gradient: Tensor, mask: Tensor | None) -> list[Tensor]:
        return self.encode(gradient).parts

    def decode_gradient(self, parts: Sequence[Tensor], spec: TensorSpec, mask: Tensor | None) -> Tensor:
        return self.decode(parts, spec).tensor


class Int8:
    """Every element in one byte, and one scale for each row: its largest magnitude / 127. To nearest."""

    num_forward_parts = num_backward_parts = 2

    def encode(self, tensor: Tensor) -> Coded:
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        largest = wide.abs().amax(-1, keepdim=True)
        # At least the smallest normal number, by which a row of zeros can be divided.
        scale = largest.div(MAX_CODE).to(torch.float32).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = wide.div(scale.to(wide.dtype)).round_().clamp_(-MAX_CODE, MAX_CODE)
        # The scale of a row that is not finite is not finite either: the codes are 0, and 0 · inf is NaN.
        return Coded([torch.nan_to_num_(codes).to(torch.int8), scale])

    def decode(self, parts: Sequence[Tensor], spec: TensorSpec) -> Decoded:
        codes, scale = parts
        wide = torch.promote_types(spec.dtype, torch.float32)
        return Decoded(codes.to(wide).mul_(scale.to(wide)).to(spec.dtype))

    def encode_gradient(self, gradient: Tensor, mask: Tensor | None) -> list[Tensor]:
        return self.encode(gradient).parts

    def decode_gradient(self, parts: Sequence[Tensor], spec: TensorSpec, mask: Tensor | None) -> Tensor:
        return self.decode(parts, spec).tensor


class LargestOfRows:
    """dct: the elements of each row whose magnitude reaches its threshold, but no zeros; of equal ones not too many."""

    num_forward_parts, num_backward_parts = 2, 1

    def __init__(self, density: float) -> None:
        self._density = density

    def encode(self, tensor: Tensor) -> Coded:
        mask = largest_of_rows(tensor, self._density)
        values = tensor[mask]
        rows_RC = mask.view(-1, mask.shape[-1])
        rows, columns = rows_RC.shape
        if uses_indices(rows, columns, values.numel()):
            return Coded([_indices_of(rows_RC), values], mask)
        return Coded([pack_bits(rows_RC), values], mask)

    def decode(self, parts: Sequence[Tensor], spec: TensorSpec) -> Decoded:
        positions, values = parts
        columns = spec.shape[-1]
        rows = spec.num_elements // columns
        if positions.dtype == torch.uint8:
            mask = unpack_bits(positions, spec.num_elements)
        else:
            mask = _mask_of(positions, rows, columns)
        mask = mask.view(spec.shape)
        return Decoded(_scatter(values, mask), mask)

    def encode_gradient(self, gradient: Tensor, mask: Tensor | None) -> list[Tensor]:
        assert mask is not None
        return [gradient[mask]]

    def decode_gradient(self, parts: Sequence[Tensor], spec: TensorSpec, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return _scatter(parts[0], mask)


def largest_of_rows(tensor: Tensor, density: float) -> Tensor:
    """The mask of dct: in each row (last dim) the `num_sent` largest magnitudes, except zeros."""
    # Not `>= threshold`: in bfloat16 many elements equal it, and a message would have more of them than the plan says.
    indices = tensor.abs().topk(num_sent(tensor.shape[-1], density), sorted=False).indices
    mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    return mask.scatter_(-1, indices, value=True).logical_and_(tensor != 0)


def pack_bits(mask: Tensor) -> Tensor:
    """A mask in one bit for each element, uint8; the first element is the lowest bit of the first byte."""
    flat = mask.reshape(-1).view(torch.uint8)
    bits = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = bits[:, 0].clone()
    for place in range(1, 8):
        packed |= bits[:, place] << place
    return packed


def unpack_bits(packed: Tensor, num_elements: int) -> Tensor:
    """The flat mask of so many elements that `pack_bits` has packed."""
    bits = torch.stack([(packed >> place) & 1 for place in range(8)], dim=1)
    return bits.view(-1)[:num_elements].bool()


def _indices_of(mask_RC: Tensor) -> Tensor:
    """A count for each row, then the columns of the kept elements, two bytes each."""
    counts_R, columns_K = mask_RC.sum(1), mask_RC.nonzero()[:, 1]
    return torch.cat([counts_R, columns_K]).to(torch.int16)  # beyond 32,767 as a negative number


def _mask_of(positions: Tensor, rows: int, columns: int) -> Tensor:
    numbers = positions.to(torch.int64) & 0xFFFF
    counts_R, columns_K = numbers[:rows], numbers[rows:]
    rows_K = torch.arange(rows, device=numbers.device).repeat_interleave(counts_R)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=numbers.device)
    mask[rows_K, columns_K] = True
    return mask


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Zeros, with the values where the mask is set."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter_(mask, values)


# ---- compression of edges ------------------------------------------------------------------------------------------


UNCHANGED = Unchanged()


class KeptTensor(NamedTuple):
    """What both ends know of a tensor that needs a gradient."""

    spec: TensorSpec
    mask: Tensor | None


Kept = Sequence[KeptTensor]


class Packed(NamedTuple):
    """What is sent of a microbatch's activations, and what is kept for their gradients."""

    message: Sequence[Tensor]
    kept: Kept = ()


class Unpacked(NamedTuple):
    """The activations that have arrived, and what is kept for their gradients."""

    tensors: list[Tensor]
    kept: Kept = ()


class Compression:
    """How messages between stages are encoded: as the plan's `edge` says. Of kind "none" they are their tensors."""

    def __init__(self, spec: EdgeSpec, device: torch.device) -> None:
        self._spec, self._device, self._is_coded = spec, device, spec.kind != "none"
        formats = {"none": Unchanged, "bf16": Bfloat16, "int8": Int8, "dct": lambda: LargestOfRows(spec.density)}
        self._format: TensorFormat = formats[spec.kind]()

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor]) -> Packed:
        """The message of a microbatch's activations."""
        if not self._is_coded:
            return Packed(tensors)
        message = [torch.tensor(encode(specs(tensors)), device=self._device)]
        kept = []
        for tensor, spec in zip(tensors, specs(tensors), strict=True):
            coded = self._format_of(spec).encode(tensor.detach())
            message += coded.parts
            if spec.needs_gradient:
                kept.append(KeptTensor(spec, coded.mask))
        return Packed(message, kept)

    @torch.no_grad()
    def unpack(self, message: list[Tensor]) -> Unpacked:
        """The activations of a message; those that need a gradient require it."""
        if not self._is_coded:
            return Unpacked(message)
        header, *parts = message
        rest, tensors, kept = iter(parts), [], []
        for spec in decode(header.tolist()):
            each = self._format_of(spec)
            decoded = each.decode(_take(rest, each.num_forward_parts), spec)
            tensors.append(decoded.tensor.requires_grad_(spec.needs_gradient))
            if spec.needs_gradient:
                kept.append(KeptTensor(spec, decoded.mask))
        return Unpacked(tensors, kept)

    @torch.no_grad()
    def pack_gradients(self, gradients: Sequence[Tensor], kept: Kept) -> Sequence[Tensor]:
        """The message of the gradients of the activations that need one."""
        if not self._is_coded:
            return gradients
        message = []
        for gradient, (spec, mask) in zip(gradients, kept, strict=True):
            message += self._format_of(spec).encode_gradient(gradient.detach(), mask)
        return message

    @torch.no_grad()
    def unpack_gradients(self, message: list[Tensor], kept: Kept) -> list[Tensor]:
        """The gradients of a message."""
        if not self._is_coded:
            return message
        rest, gradients = iter(message), []
        for spec, mask in kept:
            each = self._format_of(spec)
            gradients.append(each.decode_gradient(_take(rest, each.num_backward_parts), spec, mask))
        return gradients

    def _format_of(self, spec: TensorSpec) -> TensorFormat:
        is_coded = self._spec.codes(spec.shape, spec.dtype.itemsize, is_float=spec.dtype.is_floating_point)
        return self._format if is_coded else UNCHANGED


def _take(parts: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(parts) for _ in range(count)]
