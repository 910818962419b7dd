"""The user's optimizer: given, or made by the user's factory, and checked for what its update needs on flat buffers.

element-wise  an update in which no element depends on another: it may run on flat buffers as it is
layer-wise    an update in which an element depends on two norms of its parameter: see `lars_lamb`
Law: an optimizer that trains every parameter exactly once, in one of these two ways, is accepted. Others are refused.
Law: an option that would make every weight NaN or infinite in the first update is refused before that update.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.optim.lars_lamb import LAYERWISE
from fourfold.torch_kit.torch_private import avoid_dynamo_import, step_without_wrappers
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import OptimizerError, Problem

# ---- option checks -------------------------------------------------------------------------------------------------

# These multiply what is added to a weight. Others may be infinite on purpose, for example a bound on the step size.
FINITE_OPTIONS = ("lr", "weight_decay", "momentum", "dampening", "lr_decay", "eps")
_TORCH = Path(torch.__file__).parent


def call_factory(factory: Callable[[Any], Any], parameters: Any) -> Any:
    """`factory(parameters)`. Raises OptimizerError for options that torch refuses, for example a negative rate."""
    try:
        with noting(f"  in the optimizer's function, {describe_function(factory)}"):
            return factory(parameters)
    except (TypeError, ValueError) as error:
        if not comes_from_torch(error.__traceback__):
            raise  # An error of the user's own code: its traceback says more.
        got = f"{describe_function(factory)}: {error}"
        raise OptimizerError(Problem(got, "options that the optimizer accepts")) from error


def check_options(optimizer: Optimizer) -> None:
    """Raise OptimizerError with all options that are not finite, of all groups."""
    if problems := option_problems(optimizer):
        raise OptimizerError(problems, where="the optimizer")


def option_problems(optimizer: Optimizer) -> list[Problem]:
    """All options that are not finite, of all groups."""
    problems = []
    for number, group in enumerate(optimizer.param_groups):
        where = f" in group {number}" if len(optimizer.param_groups) > 1 else ""
        for name, value in _numeric_options(group):
            if math.isnan(value) or (name in FINITE_OPTIONS and math.isinf(value)):
                attempt = "lr = 1e-3" if name == "lr" else ""
                problems.append(Problem(f"{name} = {value}{where}", "a finite number", attempt))
    return problems


def _numeric_options(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, float) or (isinstance(each, Tensor) and each.numel() == 1 and not each.is_meta):
                yield name, float(each)


def comes_from_torch(traceback: TracebackType | None) -> bool:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and _TORCH in Path(traceback.tb_frame.f_code.co_filename).parents


# ---- the user's optimizer ------------------------------------------------------------------------------------------


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
OptimizerSource = OptimizerFactory | Optimizer
"""What the user gives: a function that makes the optimizer of the model's parameters, or this optimizer itself."""


def support_problems(optimizer: Optimizer) -> list[Problem]:
    """Why the optimizer's update cannot run on flat buffers, where it is made again from class and options."""
    kind = type(optimizer)
    if kind not in (*ELEMENTWISE, *LAYERWISE):
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        ours = ", ".join(f"ff.optim.{cls.__name__}" for cls in LAYERWISE)
        attempt = "one of these, or ff.DistributedOptimizer, which runs any optimizer as it is"
        need = f"an element-wise optimizer of torch.optim ({known}), or {ours}"
        base = next((cls.__name__ for cls in kind.__mro__ if cls in (*ELEMENTWISE, *LAYERWISE)), None)
        return [Problem(kind.__name__ if base is None else f"{kind.__name__}, a subclass of {base}", need, attempt)]
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return [Problem("differentiable = True", "an update outside autograd", "differentiable = False")]
    return []


def is_layerwise(optimizer: Optimizer) -> bool:
    """Whether the update depends on which elements belong to one parameter."""
    return isinstance(optimizer, LAYERWISE)


def build_optimizer(source: OptimizerSource, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The user's optimizer over the original parameters. Raises OptimizerError if it cannot run on flat buffers.

    An optimizer that is given is returned as it is, so that its schedulers go on acting on it.
    """
    avoid_dynamo_import()
    optimizer = source if isinstance(source, Optimizer) else call_factory(source, parameters)
    if not isinstance(optimizer, Optimizer):
        attempt = "functools.partial(torch.optim.AdamW, lr=3e-4)"
        raise OptimizerError(Problem(repr(optimizer), "a function from parameters to a torch optimizer", attempt))
    problems = support_problems(optimizer)
    problems += option_problems(optimizer) + _param_problems(optimizer, parameters, is_given=optimizer is source)
    if problems:
        raise OptimizerError(problems, where="the optimizer")
    return optimizer


def _param_problems(optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, is_given: bool) -> list[Problem]:
    """Require every trainable parameter of the model once, and no other."""
    problems, own_ids = [], {id(p) for p in parameters}
    grouped_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    num_foreign = len(grouped_ids - own_ids)
    if num_foreign:
        need = "an optimizer of model.parameters()" if is_given else "an optimizer of the parameters it is given"
        attempt = "the optimizer made last, when the model has all its parameters" if is_given else ""
        problems.append(Problem(f"{num_foreign} parameters that are not the model's", need, attempt))
    # torch only warns, and updates them once for each mention.
    num_repeated = sum(len(group["params"]) for group in optimizer.param_groups) - len(grouped_ids)
    if num_repeated:
        got = f"{num_repeated} parameters that are in a group more than once"
        problems.append(Problem(got, "every parameter once", "each parameter once, as in model.parameters()"))
    num_missing = sum(p.requires_grad and id(p) not in grouped_ids for p in parameters)
    if num_missing:
        got = f"{num_missing} trainable parameters that are in no group"
        problems.append(Problem(got, "every trainable parameter in a group", "p.requires_grad_(False) for them"))
    return problems


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
