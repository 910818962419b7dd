"""Step programs: this rank's programs, before and after what the first step learns.

record   what later steps keep of the first: the launch order of buckets, the nominal count, the order of unshards
Law: what is not in the program does not happen, except a use of weights out of turn, which is counted.
"""

from collections.abc import Sequence

from fourfold.plan.data.step_program import DataStepSpec, StepSync, UseOrders, lower_evaluation, lower_step
from fourfold.words.program import Action, Verb

NO_ORDERS = UseOrders((), (), ())


class StepPrograms:
    """The programs of one rank."""

    def __init__(self, spec: DataStepSpec, *, is_local: bool, interval: int) -> None:
        """`is_local`: ranks average their weights after every `interval` steps, and train alone in between."""
        self._spec = spec._replace(use_orders=NO_ORDERS, measures_nominal_count=True)
        self._syncs = (StepSync.WEIGHTS, StepSync.NOTHING) if is_local else (StepSync.GRADIENTS, StepSync.GRADIENTS)
        self._interval = interval
        self.nominal_count: float | None = None
        """What gradients are divided by in backward; None before the first step."""
        self.has_record = False
        self._lower()

    def _lower(self) -> None:
        at_sync, between = (lower_step(self._spec._replace(sync=sync)) for sync in self._syncs)
        self.at_sync: tuple[Action, ...] = at_sync
        """The actions of a step; with local steps: of one at whose end weights are averaged."""
        self.between: tuple[Action, ...] = between
        """With local steps: the actions of a step without an average; else of a step."""
        self.evaluation = lower_evaluation(self._spec)
        """The actions of an evaluation: a forward, and the sums of its loss and counts."""

    @property
    def forward_only(self) -> tuple[Action, ...]:
        """The actions of an evaluation whose sums the caller adds up."""
        return tuple(action for action in self.evaluation if action.verb != Verb.MEASURE)

    @property
    def launch_order(self) -> Sequence[int]:
        """The order of the reductions, as recorded; empty before."""
        return self._spec.launch_order

    def of_step(self, number: int) -> tuple[Action, ...]:
        """The program of step `number`, from 1."""
        return self.between if number % self._interval else self.at_sync

    def set_nominal_count(self, count: float | None) -> None:
        """Fix what gradients are divided by; None: the next step measures it."""
        self.nominal_count = count
        self._spec = self._spec._replace(measures_nominal_count=count is None)
        self._lower()

    def set_record(self, launch_order: Sequence[int], nominal_count: float) -> None:
        """Fix the launch order and the nominal count for all later steps, the same on every rank."""
        self.has_record = True
        self._spec = self._spec._replace(launch_order=tuple(launch_order))
        self.set_nominal_count(nominal_count)

    def set_use_orders(self, orders: UseOrders) -> None:
        """Fix the order in which each phase unshards buckets."""
        if orders != self._spec.use_orders:
            self._spec = self._spec._replace(use_orders=orders)
            self._lower()
