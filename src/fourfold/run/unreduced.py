"""Unreduced gradients: what is in `.grad` at `step()`, and no reduction has seen since the last step.

unseen  parameters whose `.grad` may hold such a gradient: set by hand, or left by a backward within `no_sync()`
late    parameters that were frozen when the buckets were made: no reduction ever sees them
Law: an optimizer step moves weights only by what all ranks have alike. The check is this rank's own, without
communication; once a reduction has seen a gradient, what is done to it on one rank alone is not found.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.words.errors import Problem, TrainingError

SHOWN = 3  # names in a message


class Reduced(NamedTuple):
    """A parameter whose gradient is reduced: its name, the slot that then holds it, and the `.grad` that shows it."""

    name: str
    parameter: nn.Parameter
    slot: Tensor
    view: Tensor


class Unreduced:
    """Knows which gradients of a rank no reduction has seen since the last step."""

    def __init__(self, reduced: Sequence[Reduced], late: Mapping[str, nn.Parameter]) -> None:
        self._reduced, self._late = reduced, late
        self._slots = list({id(each.slot): each.slot for each in reduced}.values())
        self._all = range(len(reduced))
        self._unseen: Sequence[int] = self._all
        # Autograd and the user may write into what the last step has used: then the version of the slot is another.
        self._versions: dict[int, int] = {}

    def touched(self) -> None:
        """A backward without reduction has added to gradients."""
        self._unseen, self._versions = self._all, {}

    def reduced(self, used: Sequence[float]) -> None:
        """A reduction has ended; on how many ranks each parameter has a gradient in it."""
        self._unseen = [] if all(used) else [number for number in self._unseen if not used[number]]

    def stepped(self) -> None:
        """The optimizer has used what was in `.grad`."""
        self._unseen = self._all
        self._versions = {id(slot): slot._version for slot in self._slots}

    def refuse(self) -> None:
        """Raise TrainingError naming the parameters with a gradient that no reduction has seen."""
        not_averaged = "has not been averaged over the ranks since the last step"
        need = "the mean gradient: with gradients of their own the ranks' weights would drift apart"
        problems = []
        unseen = [each.name for each in map(self._reduced.__getitem__, self._unseen) if self._is_unseen(each)]
        if unseen:
            attempt = "loss.backward() outside no_sync(), and edits of .grad only after it"
            problems.append(Problem(f".grad of {_shown(unseen)} {not_averaged}", need, attempt))
        late = [name for name, parameter in self._late.items() if _holds(parameter.grad)]
        if late:
            got = f".grad of {_shown(late)}, frozen when DistributedOptimizer was built, {not_averaged}"
            problems.append(Problem(got, need, "requires_grad_(True) before DistributedOptimizer(…)"))
        if problems:
            raise TrainingError(problems, where="step()")

    def _is_unseen(self, each: Reduced) -> bool:
        gradient = each.parameter.grad
        # What the last step has used, as it was: a second step with it is the same on all ranks.
        is_last = gradient is each.view and self._versions.get(id(each.slot)) == each.slot._version
        return not is_last and _holds(gradient)


@torch.no_grad()
def _holds(gradient: Tensor | None) -> bool:
    """Whether there is a gradient, other than zeros, which every rank may have."""
    return gradient is not None and (gradient.layout is not torch.strided or bool(gradient.any()))


def _shown(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
