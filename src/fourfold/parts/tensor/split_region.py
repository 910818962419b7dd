"""Split region: the layers between a tensor that all tensor ranks hold and the sum of what they make of it.

enter    the whole tensor, at the entry of a region: its gradients on the ranks are addends, and are summed in backward
leave    the ranks' partial outputs, at the end of a region: they are summed in forward
partial  a weight that all ranks hold and that works on split activations: its gradients are addends too
Law: outside of regions all ranks compute the same, bit for bit; a tensor is entered once, however many layers use it.

Source: Megatron-LM (arXiv 1909.08053), where `enter` is f and `leave` is g.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fourfold.parts.comm.tensor.protocol import TensorGroup
from fourfold.parts.torch_private import version_of
from fourfold.plan.tensor_shard import TensorShard


class SplitRegion:
    """The regions of one rank's model."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._entered = WeakTensorKeyDictionary()
        """By tensor: its version, and what it was entered as, with gradients. This holds no reference to the tensor."""

    @contextlib.contextmanager
    def with_group(self, group: TensorGroup) -> Iterator[None]:
        """Within, another group of the same ranks does the sums."""
        before, self.group = self.group, group
        try:
            yield
        finally:
            self.group = before

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitRegion":
        return self  # a copied model computes with the same ranks

    def enter(self, tensor: Tensor) -> Tensor:
        """The same values; in backward the ranks' gradients of it are summed, once for all layers that use it."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        known: tuple[int, Tensor] | None = self._entered.get(tensor)
        if known is not None and known[0] == version_of(tensor):  # else it has been changed in place since
            return known[1]
        entered = _SumGrad.apply(tensor, self.group)
        self._entered[tensor] = version_of(tensor), entered
        return entered

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on all of them; `partial` may be overwritten."""
        return _Sum.apply(partial, self.group)

    def partial(self, weight: Tensor) -> Tensor:
        """A weight that all ranks hold and that works on split activations: its gradients are summed."""
        return _SumGrad.apply(weight, self.group)

    def partial_pieces(self, weight: Tensor, shard: TensorShard) -> Tensor:
        """A weight some of whose pieces several ranks hold: the gradients of each piece are summed over its ranks."""
        return _SumPieceGrads.apply(weight, self.group, shard)


def gather_last_dim(tensor: Tensor, group: TensorGroup, length: int) -> Tensor:
    """The ranks' slices of the last dim, one behind the other; the last ones may be shorter, `length` is of all."""
    return _Gather.apply(tensor, group, length)


class _SumGrad(torch.autograd.Function):
    """The same values in forward; the sum over ranks in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        # Not a view, which would keep its base alive; the version is shared, so autograd sees changes in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """The sum over ranks in forward; the same gradient on each rank in backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: TensorGroup) -> Tensor:
        total = group.all_reduce(partial)
        if total is partial:
            ctx.mark_dirty(partial)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """The whole last dim in forward; this rank's slice of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, length: int) -> Tensor:
        share = -(-length // group.size)
        ctx.start, ctx.length = group.index * share, tensor.shape[-1]
        padded = torch.nn.functional.pad(tensor, (0, share - ctx.length)) if ctx.length < share else tensor
        return group.all_gather(padded, tensor.ndim - 1)[..., :length]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][..., ctx.start : ctx.start + ctx.length], None, None


class _SumPieceGrads(torch.autograd.Function):
    """The same values in forward; in backward, each replicated piece's gradient summed over the ranks that hold it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: TensorGroup, shard: TensorShard) -> Tensor:
        ctx.group, ctx.shard = group, shard
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        group, shard = ctx.group, ctx.shard
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        parts = grad.split([piece.length for piece in shard.pieces], shard.dim)
        shared = [(part, piece.num_replicas) for part, piece in zip(parts, shard.pieces, strict=True)]
        shared = [(part, sharing) for part, sharing in shared if sharing > 1]
        # Every rank adds its gradient at the place of its own piece: one sum over all ranks serves all pieces.
        places = [part.new_zeros((group.size // sharing, *part.shape)) for part, sharing in shared]
        for place, (part, sharing) in zip(places, shared, strict=True):
            place[group.index // sharing] = part
        total = group.all_reduce(torch.cat([place.reshape(-1) for place in places]))
        sums = total.split([place.numel() for place in places])
        for found, place, (part, sharing) in zip(sums, places, shared, strict=True):
            part.copy_(found.view(place.shape)[group.index // sharing])
        return grad, None, None
