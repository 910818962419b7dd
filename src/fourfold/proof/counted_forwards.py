"""Counted forwards: numbers of Python with which a model or a loss counts its forwards, such as `self.step += 1`.

Law: a number is named only if each forward changes it, and two forwards of the same samples have different losses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.model.objective import Objective
from fourfold.proof.grad_projections import is_close
from fourfold.words.error_notes import format_names
from fourfold.words.errors import Problem

ROUNDINGS = 4  # a forward on a GPU may not be the same twice


def count_problem(model: nn.Module, objective: Objective, forward: Callable[[], Tensor]) -> Problem | None:
    """What is wrong with a model or a loss that counts its forwards; None: it counts none that its loss depends on.

    forward  its loss for the same samples in each call, with the same weights and buffers
    """
    before = _numbers(model, objective)
    first, second = forward().detach(), forward().detach()
    names = [name for name, value in _numbers(model, objective).items() if value != before.get(name)]
    if not names or is_close(first, second, ROUNDINGS * torch.finfo(first.dtype).eps):
        return None
    got = f"each forward changes {format_names(names)}, and the loss depends on it"
    need = "a loss that does not depend on the number of forwards: the batch is split into parts"
    attempt = "to set it once in each step, outside of forward, such as in a callback; or dp = 1 and microbatches = 1"
    return Problem(got, need, attempt)


def _numbers(model: nn.Module, objective: Objective) -> dict[str, float]:
    """The numbers among the attributes of all modules, and of the loss, by name."""
    holders: list[tuple[str, Any]] = [*model.named_modules(), *(("", each) for each in objective.function.objects())]
    return {
        f"{path}.{name} of {type(holder).__name__}".removeprefix("."): value
        for path, holder in holders
        for name, value in getattr(holder, "__dict__", {}).items()
        if type(value) in (int, float)
    }
