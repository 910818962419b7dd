"""Products: the matrix products of split linear layers, with the sums over tensor ranks that belong to them.

column  output features are split; in backward the gradient of the input is summed while that of the weight is computed
row     input features are split; in forward the product is computed where the other ranks read it, and summed; where
        sums travel, chunk by chunk
Law: values and gradients are those of `F.linear`, with the sums of `SplitRegion`.

R rows · N out features · F in features, of which the split ones are those here

Source: the overlap in backward is that of Megatron-LM (`LinearWithGradAccumulationAndAsyncCommunication`).
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.parts.comm.tensor.protocol import TensorGroup
from fourfold.parts.deferred_grads import deferral_of
from fourfold.parts.dtypes import autocast_device
from fourfold.parts.recompute import kept


@dataclasses.dataclass
class InputUses:
    """How split layers use a tensor that is entered.

    count      how often they do
    is_summed  whether the gradient that flows back now has been summed by the layer
    """

    count: int = 0
    is_summed: bool = False


class ColumnProduct(torch.autograd.Function):
    """`F.linear` of a tensor that is entered. The only layer that uses it sums its gradient."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, uses: InputUses, group: TensorGroup
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.uses, ctx.group, ctx.autocast = uses, group, _autocast_options(input)
        ctx.deferral = deferral_of(weight, input)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        input, weight = ctx.saved_tensors  # a checkpoint computes them again here, with sums of its own
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad, grad_weight = grads[0], None
        finish = grad_input = None
        with torch.autocast(**ctx.autocast):
            if needs_input:
                grad_input = grad @ weight
                if ctx.uses.count == 1:
                    finish, ctx.uses.is_summed = ctx.group.all_reduce_async(grad_input), True
            if needs_weight and not (ctx.deferral and ctx.deferral.takes(grad, input)):
                grad_weight = grad.flatten(0, -2).t() @ input.flatten(0, -2)
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return finish() if finish else grad_input, grad_weight, grad_bias, None, None


class RowProduct(torch.autograd.Function):
    """input [..., F], weight [N, F] -> [..., N] on all ranks."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.is_region_end = True  # see `split_region.origins`
        ctx.autocast, ctx.deferral = _autocast_options(input), deferral_of(weight, input)
        casts = ctx.autocast["enabled"] or input.dtype != weight.dtype or input.ndim < 2
        (total,) = kept(lambda: (_summed_product(input, weight, group, casts=casts),))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        (input, weight), grad = ctx.saved_tensors, grads[0]
        needs_input, needs_weight, _ = ctx.needs_input_grad
        with torch.autocast(**ctx.autocast):
            grad_weight = None
            if needs_weight and not (ctx.deferral and ctx.deferral.takes(grad, input)):
                grad_weight = grad.flatten(0, -2).t() @ input.flatten(0, -2)
            return grad @ weight if needs_input else None, grad_weight, None


def _summed_product(input: Tensor, weight: Tensor, group: TensorGroup, *, casts: bool) -> Tensor:
    """The sum of the ranks' `F.linear`. `casts`: it casts, or raises its own error."""
    if casts:
        return group.all_reduce(F.linear(input, weight))
    product = group.buffer((*input.shape[:-1], weight.shape[0]), input.dtype)
    input_RF, product_RN = input.flatten(0, -2), product.view(-1, weight.shape[0])
    num_chunks = group.num_chunks(product.nbytes)
    if num_chunks == 1:
        torch.mm(input_RF, weight.t(), out=product_RN)
        return group.all_reduce(product)
    _add_by_chunks(input_RF, weight, product_RN, group, num_chunks)
    return product


def _add_by_chunks(input_RF: Tensor, weight_NF: Tensor, out_RN: Tensor, group: TensorGroup, num_chunks: int) -> None:
    """The ranks' sum of the products. The sum of a chunk of rows travels while the next chunk is computed."""
    finish = None
    for input, out in zip(input_RF.chunk(num_chunks), out_RN.chunk(num_chunks), strict=True):
        torch.mm(input, weight_NF.t(), out=out)
        if finish:
            finish()
        finish = group.all_reduce_async(out)
    if finish:
        finish()


def _autocast_options(input: Tensor) -> dict[str, Any]:
    """The autocast of forward, for backward."""
    device = autocast_device(input)
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return {"device_type": device, "enabled": enabled, "dtype": dtype}
