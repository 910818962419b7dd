"""Token collectives: from some tokens of a hidden tensor to all of them and back, with gradients.

tokens   the second-last dim of a tensor; a rank's are one range of it, the last ranks' are fewer, or none
rows     the part of a tensor that has this rank's tokens
whole    the tensor with all tokens
Law: collectives are padded to equal ranges, so ranks call the same; what they return is not padded.

Source: sequence parallelism of Megatron-LM (Korthikanti et al., arXiv 2205.05198), where `SplitTokens` and
`EnterTokens` end in g-bar, and a whole input of column layers is gathered again in backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.parts.comm.tensor.protocol import TensorGroup
from fourfold.parts.dtypes import autocast_device
from fourfold.parts.recompute import kept
from fourfold.parts.torch_private import is_in_backward
from fourfold.plan.tensor_shard import TensorShard


class TokenCount:
    """How many tokens the whole hidden tensor has in the forward, or the backward, that runs now; None: in neither.

    Rows do not tell it. Backward sets it too: the second forward of a checkpoint asks for it.
    """

    def __init__(self) -> None:
        self.value: int | None = None

    def end(self) -> None:
        """The end of a forward."""
        self.value = None

    def resume(self, rows: Tensor, group: TensorGroup) -> None:
        """Where a checkpoint runs the end of a forward for the second time: the ranks count their rows. Collective.

        A reentrant one does so before anything of this forward's graph has run, and other forwards may have had
        other lengths.
        """
        if self.value is None and is_in_backward():
            own = torch.tensor([rows.shape[-2]], device=rows.device)
            self.value = int(group.all_gather(own, 0).sum())


def token_range(length: int, group: TensorGroup) -> tuple[int, int]:
    """The tokens [start, stop) of this rank."""
    ((start, stop, _, _),) = TensorShard.even((length,), 0, group.index, group.size).pieces
    return start, stop


def own_rows(whole: Tensor, group: TensorGroup) -> Tensor:
    """This rank's tokens: a copy, so that the whole tensor can be freed."""
    start, stop = token_range(whole.shape[-2], group)
    return whole[..., start:stop, :].clone(memory_format=torch.contiguous_format)


def gather_rows(rows: Tensor, length: int, group: TensorGroup) -> Tensor:
    """All `length` tokens, of the ranks' rows."""
    padded = _pad_tokens(rows.detach(), -(-length // group.size))
    whole = group.all_gather(padded, padded.ndim - 2)
    return whole[..., :length, :].contiguous()


def add_rows(addend: Tensor, group: TensorGroup) -> Tensor:
    """This rank's tokens of the sum of the ranks' tensors."""
    start, stop = token_range(addend.shape[-2], group)
    padded = _pad_tokens(addend.detach(), -(-addend.shape[-2] // group.size) * group.size)
    total = group.reduce_scatter(padded, padded.ndim - 2)
    return total[..., : stop - start, :].contiguous()


def _pad_tokens(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[-2]
    return F.pad(tensor, (0, 0, 0, missing)) if missing else tensor


class SplitTokens(torch.autograd.Function):
    """Whole tensor -> rows. The ranks' gradients are parts of the gradient: they are gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, count: TokenCount, group: TensorGroup) -> Tensor:
        count.value = ctx.length = whole.shape[-2]
        ctx.count, ctx.group = count, group
        return own_rows(whole, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.count.value = None
        return gather_rows(grads[0], ctx.length, ctx.group), None, None


class GatherTokens(torch.autograd.Function):
    """Rows -> whole tensor, for what all ranks compute alike: each has the whole gradient, and takes its tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: TokenCount, group: TensorGroup) -> Tensor:
        assert count.value is not None
        ctx.count, ctx.group, ctx.length = count, group, count.value
        return gather_rows(rows, count.value, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.count.value = ctx.length
        return own_rows(grads[0], ctx.group), None, None


class GatheredTokens:
    """A whole tensor that is not kept for backward: there it is gathered again, once for all layers that read it."""

    def __init__(self, length: int, group: TensorGroup) -> None:
        self._length, self._group = length, group
        self._whole: Tensor | None = None

    def gather_again(self, rows: Tensor) -> Tensor:
        """The whole tensor, of its rows."""
        if self._whole is None:
            self._whole = gather_rows(rows, self._length, self._group)
        return self._whole

    def free(self) -> None:
        """Forget it: no layer reads it any more."""
        self._whole = None


class EnterTokens(torch.autograd.Function):
    """Rows -> the whole tensor for split layers: their gradients are addends, of which each rank takes its tokens.

    whole  of the same rows, without a graph
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, whole: Tensor, source: GatheredTokens, count: TokenCount, group: Any) -> Tensor:
        ctx.source, ctx.count, ctx.group, ctx.length = source, count, group, whole.shape[-2]
        return whole.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        ctx.count.value = ctx.length
        ctx.source.free()
        return add_rows(grads[0], ctx.group), None, None, None, None


class LeaveTokens(torch.autograd.Function):
    """Partial whole tensor -> rows of the sum over ranks. The ranks' gradients are parts of the sum's."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, count: TokenCount, group: TensorGroup) -> Tensor:
        ctx.count, ctx.group, ctx.length = count, group, addend.shape[-2]
        (rows,) = kept(lambda: (add_rows(addend, group),))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.count.value = ctx.length
        return gather_rows(grads[0], ctx.length, ctx.group), None, None


class LinearOfTokens(torch.autograd.Function):
    """`F.linear` of a whole input that keeps its rows only.

    rows    of the input, without a graph
    source  gathers the input again
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, source: GatheredTokens
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.source, device = source, autocast_device(input)
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        needs_input, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad, grad_NF = grads[0], grads[0].flatten(0, -2)
        grad_weight = None
        with torch.autocast(**ctx.autocast):
            if needs_weight:
                grad_weight = grad_NF.t() @ ctx.source.gather_again(rows).flatten(0, -2)
            grad_input = grad @ weight if needs_input else None
        return grad_input, None, grad_weight, grad_NF.sum(0) if needs_bias else None, None
