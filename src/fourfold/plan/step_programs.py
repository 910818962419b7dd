"""Step programs: those of all ranks, for every kind of step, and what the first step adds to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fourfold.axes.data.rules.step_program import UseOrders
from fourfold.words.program import Program


@dataclass(frozen=True)
class StepRecord:
    """What the first step learns, by stage; what is missing is predicted."""

    launch_orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    use_orders: Mapping[int, UseOrders] = field(default_factory=dict)


NO_RECORD = StepRecord()


class Programs(NamedTuple):
    """The programs of all ranks, for every kind of step. Ranks with equal programs share one tuple.

    step              one optimizer update; with local steps, of a step that averages the weights
    local_step        with local steps, of a step that does not; else `step`
    first_step        `step` while the nominal count is not known
    first_local_step  `local_step` while the nominal count is not known
    evaluation        the loss of one batch, without training
    """

    step: Program
    local_step: Program
    first_step: Program
    first_local_step: Program
    evaluation: Program

    def of_step(self, *, is_local: bool, has_nominal_count: bool) -> Program:
        """The programs of a training step."""
        if has_nominal_count:
            return self.local_step if is_local else self.step
        return self.first_local_step if is_local else self.first_step
