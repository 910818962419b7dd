"""The whole model on a tensor rank: its structure, and random whole weights.

structure    the modules of the whole model, with parameters on the meta device: they have shapes and no memory
held         all elements of the whole weights are in memory; else they take nearly none, and no forward may write them
Law: all ranks make the same weights, each from a seed of its own name, and a rank's shards are parts of them. Of the
gradient of a weight this rank's part is kept: one whole gradient is in memory at a time.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.tensor.work.layers import local_part
from fourfold.plan.param_spec import TensorShard
from fourfold.proof.checks import CheckUnavailable
from fourfold.proof.random_weights import cast_real, window_weight
from fourfold.torch_kit.model_copy import deep_copy


def copy_structure(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no memory. It shares the buffers. Raises TaskError if it has no copy."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return deep_copy(model, model, "with tp > 1, a dry run compares it with the model that is cut", memo)


class WholeWeights(NamedTuple):
    """By name: random whole parameters, this rank's parts of them, and its parts of the gradients that these get."""

    parameters: Mapping[str, nn.Parameter]
    local: Mapping[str, nn.Parameter]
    gradients: Mapping[str, Tensor]


def make_whole_weights(
    model: nn.Module,
    shards: Mapping[str, TensorShard],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    is_held: bool,
) -> WholeWeights:
    """Whole parameters of a model that has been cut, drawn by name; integers are the model's own.

    dtype  of what is drawn; None: of the parameter
    Raises CheckUnavailable for integers that are split.
    """
    parameters, local, gradients = dict[str, nn.Parameter](), dict[str, nn.Parameter](), dict[str, Tensor]()
    for name, p in model.named_parameters():
        if p.is_floating_point() or p.is_complex():
            to = p.dtype if dtype is None else cast_real(p.new_empty(0), dtype).dtype
            whole = window_weight(name, shards[name].shape, to, device)
            whole = whole.contiguous() if is_held else whole
        elif shards[name].is_whole:
            whole = p.detach().clone()
        else:
            raise CheckUnavailable(f"{name} is split, and {str(p.dtype).removeprefix('torch.')}")
        local[name] = nn.Parameter(local_part(whole, shards[name]), p.requires_grad)
        parameters[name] = nn.Parameter(whole, p.requires_grad)
        if p.requires_grad:
            parameters[name].register_post_accumulate_grad_hook(_take_part(name, shards[name], gradients))
    return WholeWeights(parameters, local, gradients)


def _take_part(name: str, shard: TensorShard, gradients: dict[str, Tensor]) -> Callable[[Tensor], None]:
    def take(whole: Tensor) -> None:
        assert whole.grad is not None
        part, whole.grad = local_part(whole.grad, shard), None
        gradients[name] = gradients[name] + part if name in gradients else part

    return take
