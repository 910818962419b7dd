"""Unreduced gradients: what is in `.grad` at `step()`, and no reduction has seen since the last step.

unseen  parameters whose `.grad` may hold such a gradient: set by hand, or left by a backward within `no_sync()`
late    parameters that are in no bucket: frozen when the buckets were made, or given to the optimizer since
Law: an optimizer step moves weights only by what all ranks have alike. The check is this rank's own, without
communication; once a reduction has seen a gradient, what is done to it on one rank alone is not found.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.parts.torch_private import version_of
from fourfold.words.errors import Problem, TrainingError

MAX_NAMES = 3  # names in a message


class ReducedGrad(NamedTuple):
    """A parameter whose gradient is reduced: its name, and the slot that then holds it."""

    name: str
    parameter: nn.Parameter
    slot: Tensor


class UnreducedGrads:
    """Knows which gradients of a rank no reduction has seen since the last step."""

    def __init__(self, reduced: Sequence[ReducedGrad], views: Sequence[Tensor], optimizer: Optimizer) -> None:
        """`views`: the `.grad` of each parameter after a reduction. The list may get others."""
        self._reduced, self._views, self._optimizer = reduced, views, optimizer
        self._known_ids = {id(each.parameter) for each in reduced}
        self._slots = list({id(each.slot): each.slot for each in reduced}.values())
        self._all = range(len(reduced))
        self._maybe_unreduced: Sequence[int] = self._all
        # Autograd and the user may write into what the last step has used: then the version of the slot is another.
        self._versions: dict[int, int] = {}

    def mark_touched(self) -> None:
        """A backward without reduction has added to gradients."""
        self._maybe_unreduced, self._versions = self._all, {}

    def mark_reduced(self, used: Sequence[float]) -> None:
        """A reduction has ended; on how many ranks each parameter has a gradient in it."""
        self._maybe_unreduced = [] if all(used) else [number for number in self._maybe_unreduced if not used[number]]

    def mark_stepped(self) -> None:
        """The optimizer has used what was in `.grad`."""
        self._maybe_unreduced = self._all
        self._versions = {id(slot): version_of(slot) for slot in self._slots}

    def check(self, model: nn.Module) -> None:
        """Raise TrainingError naming the parameters with a gradient that no reduction has seen."""
        not_averaged = "has not been averaged over the ranks since the last step"
        need = "the mean gradient: with gradients of their own the ranks' weights would drift apart"
        problems = []
        unseen = [self._reduced[number].name for number in self._maybe_unreduced if self._is_unreduced(number)]
        if unseen:
            attempt = "loss.backward() outside no_sync(), and edits of .grad only after it"
            problems.append(Problem(f".grad of {_name_list(unseen)} {not_averaged}", need, attempt))
        # The groups as they are now: parameters may have come since the build.
        groups = self._optimizer.param_groups
        late = [p for group in groups for p in group["params"] if id(p) not in self._known_ids and _is_nonzero(p.grad)]
        if late:
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            shown = _name_list([names.get(id(p), "a parameter without a name") for p in late])
            got = f".grad of {shown}, frozen when DistributedOptimizer was built, or not the model's, {not_averaged}"
            attempt = "requires_grad_(True) before DistributedOptimizer(…), or a new one around a new optimizer"
            problems.append(Problem(got, need, attempt))
        if problems:
            raise TrainingError(problems, where="step()")

    def _is_unreduced(self, number: int) -> bool:
        each = self._reduced[number]
        gradient = each.parameter.grad
        # What the last step has used, as it was: a second step with it is the same on all ranks.
        is_last = gradient is self._views[number] and self._versions.get(id(each.slot)) == version_of(each.slot)
        return not is_last and _is_nonzero(gradient)


@torch.no_grad()
def _is_nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient, other than zeros, which every rank may have."""
    return gradient is not None and (gradient.layout is not torch.strided or bool(gradient.any()))


def _name_list(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest
