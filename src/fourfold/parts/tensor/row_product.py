"""Row product: the product of split features with a row layer's weight, summed over the tensor ranks.

N out features · F in features here
Law: the values and gradients are those of `F.linear`, then the sum. The product is computed where the other ranks read
it, so nothing is copied before the sum.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.parts.comm.tensor.protocol import TensorGroup


class RowProduct(torch.autograd.Function):
    """input [..., F], weight [N, F] -> [..., N] on all ranks."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:
        ctx.save_for_backward(input, weight)
        device = input.device.type
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        if ctx.autocast["enabled"] or input.dtype != weight.dtype or input.ndim < 2:
            return group.all_reduce(F.linear(input, weight))  # casts, or raises its own error
        product = group.buffer((*input.shape[:-1], weight.shape[0]), input.dtype)
        torch.mm(input.flatten(0, -2), weight.t(), out=product.view(-1, weight.shape[0]))
        return group.all_reduce(product)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        (input, weight), grad = ctx.saved_tensors, grads[0]
        needs_input, needs_weight, _ = ctx.needs_input_grad
        with torch.autocast(**ctx.autocast):
            grad_weight = grad.flatten(0, -2).t() @ input.flatten(0, -2) if needs_weight else None
            return grad @ weight if needs_input else None, grad_weight, None
