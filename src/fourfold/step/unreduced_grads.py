"""Unreduced gradients: what is in `.grad` at `step()` and has not been reduced since the last step.

unreduced  a gradient that was set by hand, or left by a backward within `no_sync()`
late       a parameter that is in no bucket: frozen when the buckets were made, or given to the optimizer later
Law: an optimizer step changes weights only by what is the same on all ranks. The check is local, without communication;
a change of a reduced gradient on one rank only is not found.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.torch_kit.torch_private import version_of
from fourfold.words.errors import Problem, TrainingError

MAX_NAMES = 3  # in a message


class ReducedGrad(NamedTuple):
    """A parameter whose gradient is reduced, and the buffer that holds it after a reduction."""

    name: str
    parameter: nn.Parameter
    slot: Tensor


class UnreducedGrads:
    """Tracks which gradients of a rank have not been reduced since the last step."""

    def __init__(
        self, reduced: Sequence[ReducedGrad], views: Sequence[Tensor], optimizer: Optimizer, model: nn.Module
    ) -> None:
        """`views`: the `.grad` of each parameter after a reduction. The list may change later."""
        self._reduced, self._views, self._optimizer, self._model = reduced, views, optimizer, model
        self._known_ids = {id(each.parameter) for each in reduced}
        self._slots = list({id(each.slot): each.slot for each in reduced}.values())
        self._all = range(len(reduced))
        self._maybe_unreduced: Sequence[int] = self._all
        # Autograd and the user may write into a gradient that the last step has used: that changes the slot's version.
        self._versions: dict[int, int] = {}

    def mark_touched(self) -> None:
        """A backward without reduction has added to gradients."""
        self._maybe_unreduced, self._versions = self._all, {}

    def mark_reduced(self, used: Sequence[float]) -> None:
        """A reduction has ended. `used`: on how many ranks each parameter has a gradient."""
        self._maybe_unreduced = [] if all(used) else [index for index in self._maybe_unreduced if not used[index]]

    def mark_stepped(self) -> None:
        """The optimizer has used what was in `.grad`."""
        self._maybe_unreduced = self._all
        self._versions = {id(slot): version_of(slot) for slot in self._slots}

    def check(self) -> None:
        """Raise TrainingError naming the parameters with an unreduced gradient."""
        not_averaged = "has not been averaged over the ranks since the last step"
        need = "the mean gradient: with different gradients the weights of the ranks would diverge"
        problems = []
        unreduced = [self._reduced[index].name for index in self._maybe_unreduced if self._is_unreduced(index)]
        if unreduced:
            attempt = "loss.backward() outside no_sync(), and edits of .grad only after it"
            problems.append(Problem(f".grad of {_name_list(unreduced)} {not_averaged}", need, attempt))
        # The present groups: parameters may have been added since the build.
        groups = self._optimizer.param_groups
        late = [p for group in groups for p in group["params"] if id(p) not in self._known_ids and _is_nonzero(p.grad)]
        if late:
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
            shown = _name_list([names.get(id(p), "a parameter without a name") for p in late])
            got = f".grad of {shown}, frozen when DistributedOptimizer was built, or not the model's, {not_averaged}"
            attempt = "requires_grad_(True) before DistributedOptimizer(…), or a new one around a new optimizer"
            problems.append(Problem(got, need, attempt))
        if problems:
            raise TrainingError(problems, where="step()")

    def _is_unreduced(self, index: int) -> bool:
        reduced = self._reduced[index]
        gradient = reduced.parameter.grad
        # The gradient of the last step, unchanged: a second step with it is the same on all ranks.
        is_unchanged = gradient is self._views[index] and self._versions.get(id(reduced.slot)) == version_of(
            reduced.slot
        )
        return not is_unchanged and _is_nonzero(gradient)


@torch.no_grad()
def _is_nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient with a nonzero element; zeros are harmless. A sparse gradient counts as nonzero."""
    return gradient is not None and (gradient.layout is not torch.strided or bool(gradient.any()))


def _name_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
