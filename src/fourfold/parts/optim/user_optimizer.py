"""The user's optimizer: made by the user's factory, and checked for what its update needs on flat buffers.

element-wise  an update in which no element depends on another: it may run on flat buffers as it is
layer-wise    an update in which an element depends on two norms of its parameter: see `layerwise`
Law: an optimizer that trains every parameter exactly once, in one of these two ways, is accepted. Others are refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.parts.optim.lars_lamb import LAYERWISE
from fourfold.parts.optim.option_checks import call_factory, check_options
from fourfold.parts.torch_private import avoid_dynamo_import, step_without_wrappers
from fourfold.words.errors import OptimizerError, Problem

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def check_supported(optimizer: Optimizer) -> None:
    """Raise OptimizerError unless the optimizer's update can run on flat buffers."""
    kind = type(optimizer)
    if kind not in (*ELEMENTWISE, *LAYERWISE):
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        ours = ", ".join(f"ff.optim.{cls.__name__}" for cls in LAYERWISE)
        attempt = "one of these, or ff.DistributedOptimizer, which runs any optimizer as it is"
        need = f"an element-wise optimizer of torch.optim ({known}), or {ours}"
        raise OptimizerError(Problem(kind.__name__, need, attempt))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(Problem("differentiable = True", "an update outside autograd", "differentiable = False"))


def is_layerwise(optimizer: Optimizer) -> bool:
    """Whether the update depends on which elements belong to one parameter."""
    return isinstance(optimizer, LAYERWISE)


def build_optimizer(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The user's optimizer over the original parameters. Raises OptimizerError if it cannot run on flat buffers."""
    avoid_dynamo_import()
    optimizer = call_factory(factory, parameters)
    if not isinstance(optimizer, Optimizer):
        attempt = "functools.partial(torch.optim.AdamW, lr=3e-4)"
        raise OptimizerError(Problem(repr(optimizer), "a function from parameters to a torch optimizer", attempt))
    check_supported(optimizer)
    check_options(optimizer)
    grouped_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    num_foreign = len(grouped_ids - {id(p) for p in parameters})
    if num_foreign:
        problem = Problem(
            f"{num_foreign} parameters that are not the model's", "an optimizer of the parameters it is given"
        )
        raise OptimizerError(problem)
    # torch only warns, and updates them once for each mention.
    num_repeated = sum(len(group["params"]) for group in optimizer.param_groups) - len(grouped_ids)
    if num_repeated:
        got = f"{num_repeated} parameters that are in a group more than once"
        raise OptimizerError(Problem(got, "every parameter once", "each parameter once, as in model.parameters()"))
    num_missing = sum(p.requires_grad and id(p) not in grouped_ids for p in parameters)
    if num_missing:
        got = f"{num_missing} trainable parameters that are in no group"
        raise OptimizerError(Problem(got, "every trainable parameter in a group", "p.requires_grad_(False) for them"))
    return optimizer


def num_state_tensors(optimizer: Optimizer, group: int) -> int:
    """How many tensors of a parameter's shape an update keeps for each parameter of a group."""
    state, trial = _trial_state(optimizer, group)
    return sum(isinstance(value, Tensor) and value.shape == trial.shape for value in state.values())


def state_keys(optimizer: Optimizer, group: int) -> set[str]:
    """What an update keeps for each parameter of a group, by name."""
    return set(_trial_state(optimizer, group)[0])


@torch.no_grad()
def _trial_state(optimizer: Optimizer, group: int) -> tuple[dict[str, Any], nn.Parameter]:
    """The state after an update of a small parameter with a group's options, and that parameter."""
    # Found by trying: it depends on options (momentum, amsgrad), and optimizers do not say it.
    trial = nn.Parameter(torch.zeros(2))
    trial.grad = torch.zeros(2)
    options = {k: v for k, v in optimizer.param_groups[group].items() if k != "params"}
    kind: Any = type(optimizer)
    flat: Optimizer = kind([trial], lr=options["lr"])
    flat.param_groups[0].update(options)
    step_without_wrappers(flat)
    return flat.state[trial], trial


def group_indices(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The index of each parameter's group, by name. Parameters in no group are left out."""
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: group_of[id(p)] for name, p in parameters.items() if id(p) in group_of}
