"""Compression of edges: what a message of activations becomes before it is sent, and what both ends remember of it.

message  the specs of its tensors as int64 words, then the parts of each (`formats.py`); of gradients the parts alone
kept     what both ends know of the tensors that need a gradient, until it is sent: their specs and masks
Law: both ends keep the same. Without compression a message is its tensors.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.parts.comm.edge.formats import Bfloat16, Int8, LargestOfRows, TensorFormat, Unchanged
from fourfold.parts.comm.edge.message import TensorSpec, decode, encode, specs
from fourfold.plan.pipeline.edges import EdgeSpec

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


class Compression(Protocol):
    """How messages between stages are encoded."""

    def pack(self, tensors: Sequence[Tensor]) -> Packed:
        """The message of a microbatch's activations."""
        ...

    def unpack(self, message: list[Tensor]) -> Unpacked:
        """The activations of a message; those that need a gradient require it."""
        ...

    def pack_gradients(self, gradients: Sequence[Tensor], kept: Kept) -> Sequence[Tensor]:
        """The message of the gradients of the activations that need one."""
        ...

    def unpack_gradients(self, message: list[Tensor], kept: Kept) -> list[Tensor]:
        """The gradients of a message."""
        ...


class NoCompression:
    """See `Compression`. Messages are their tensors."""

    def pack(self, tensors: Sequence[Tensor]) -> Packed:
        return Packed(tensors)

    def unpack(self, message: list[Tensor]) -> Unpacked:
        return Unpacked(message)

    def pack_gradients(self, gradients: Sequence[Tensor], kept: Kept) -> Sequence[Tensor]:
        return gradients

    def unpack_gradients(self, message: list[Tensor], kept: Kept) -> list[Tensor]:
        return message


class EdgeCompression:
    """See `Compression`. As the plan's `edge` says."""

    def __init__(self, spec: EdgeSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        formats = {"bf16": Bfloat16, "int8": Int8, "dct": lambda: LargestOfRows(spec.density)}
        self._format: TensorFormat = formats[spec.kind]()

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor]) -> Packed:
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
        message = []
        for gradient, (spec, mask) in zip(gradients, kept, strict=True):
            message += self._format_of(spec).encode_gradient(gradient.detach(), mask)
        return message

    @torch.no_grad()
    def unpack_gradients(self, message: list[Tensor], kept: Kept) -> list[Tensor]:
        rest, gradients = iter(message), []
        for spec, mask in kept:
            each = self._format_of(spec)
            gradients.append(each.decode_gradient(_take(rest, each.num_backward_parts), spec, mask))
        return gradients

    def _format_of(self, spec: TensorSpec) -> TensorFormat:
        is_coded = self._spec.codes(spec.shape, spec.dtype.itemsize, is_float=spec.dtype.is_floating_point)
        return self._format if is_coded else UNCHANGED


def make_compression(spec: EdgeSpec, device: torch.device) -> Compression:
    """The compression of a plan's edges."""
    return NoCompression() if spec.kind == "none" else EdgeCompression(spec, device)


def _take(parts: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(parts) for _ in range(count)]
