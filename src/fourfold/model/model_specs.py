"""Model specs: what lowering needs to know of a model and its optimizer, as plain data.

Law: a meta model has the same specs as the model itself.
"""

import math
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from fourfold.axes.data.work.weight_storage import NO_SHARDS, param_specs
from fourfold.model.weights import trainable_parameters
from fourfold.optim.user_optimizer import group_indices, is_layerwise, num_state_tensors
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.tensor_shard import TensorShard
from fourfold.torch_kit import mixed_precision


def model_specs(
    model: nn.Module, optimizer: Optimizer, shards: Mapping[str, Sequence[TensorShard]] = NO_SHARDS
) -> list[ParamSpec]:
    """The trained parameters, in order of definition. `shards`: of the places of the tensor axis; empty: tp = 1."""
    trainable = trainable_parameters(model)
    return param_specs(trainable, group_indices(optimizer, trainable), shards)


def num_parameters(model: nn.Module, shards: Mapping[str, TensorShard]) -> int:
    """The elements of all parameters of the whole model. `shards`: what this rank holds of those that are cut."""
    shapes = (shards[name].shape if name in shards else p.shape for name, p in model.named_parameters())
    return sum(map(math.prod, shapes))


def update_spec(
    model: nn.Module, optimizer: Optimizer, *, clip: float | None = None, counts_states: bool = False
) -> UpdateSpec:
    """How the step updates. `counts_states`: find out how many states there are, by a trial step for each group."""
    groups = range(len(optimizer.param_groups)) if counts_states else ()
    return UpdateSpec(
        clip,
        type(optimizer).__name__,
        is_layerwise=is_layerwise(optimizer),
        num_states=tuple(num_state_tensors(optimizer, group) for group in groups),
        full_precision_params=frozenset(mixed_precision.full_precision_params(model)),
    )
