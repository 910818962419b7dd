"""Option checks: whether the options of the user's optimizer can train.

Law: an option that would make every weight NaN or infinite in the first update is refused before that update.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import OptimizerError, Problem

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
