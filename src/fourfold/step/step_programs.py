"""Step programs: this rank's programs, before and after what the first step learns.

record  what later steps keep of the first: the launch order of buckets, the nominal count, the use orders of unshards
Law: what is not in the program does not happen, except a use of weights out of turn, which is counted.
"""

from collections.abc import Mapping, Sequence

from fourfold.plan.data.step_program import UseOrders
from fourfold.plan.lowering import Blueprint, StepRecord
from fourfold.words.program import Action, Verb

STAGE = 0  # there is one
NOT_LEARNT = UseOrders((), (), ())


class StepPrograms:
    """The programs of one rank."""

    def __init__(self, blueprint: Blueprint, rank: int) -> None:
        self._blueprint, self._rank = blueprint, rank
        self._launch_order: tuple[int, ...] = ()
        self._use_orders = NOT_LEARNT
        self.nominal_count: float | None = None
        """What gradients are divided by in backward; None: the next step measures it."""
        self.has_record = False
        self._lower()

    def _lower(self) -> None:
        record = StepRecord({STAGE: self._launch_order}, {STAGE: self._use_orders})
        self._programs = self._blueprint.programs(record)

    @property
    def ranks_by_memory(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that meet in shared memory, a tuple for each."""
        return self._blueprint.ranks_by_memory

    @property
    def at_sync(self) -> tuple[Action, ...]:
        """The actions of a step; with local steps: of one at whose end weights are averaged."""
        return self._programs.step[self._rank]

    @property
    def between(self) -> tuple[Action, ...]:
        """With local steps: the actions of a step without an average; else of a step."""
        return self._programs.local_step[self._rank]

    @property
    def evaluation(self) -> tuple[Action, ...]:
        """The actions of an evaluation: a forward, and the sums of its loss and counts."""
        return self._programs.evaluation[self._rank]

    @property
    def forward_only(self) -> tuple[Action, ...]:
        """The actions of an evaluation whose sums the caller adds up."""
        return tuple(action for action in self.evaluation if action.verb != Verb.MEASURE)

    @property
    def launch_order(self) -> Sequence[int]:
        """The order of the reductions, as recorded; empty before."""
        return self._launch_order

    def of_step(self, number: int) -> tuple[Action, ...]:
        """The program of step `number`, from 1."""
        is_local = number % self._blueprint.plan.sync_interval > 0
        has_count = self.nominal_count is not None
        return self._programs.of_step(is_local=is_local, has_nominal_count=has_count)[self._rank]

    def set_record(self, launch_order: Sequence[int], nominal_count: float) -> None:
        """Fix the launch order and the nominal count for all later steps, the same on every rank."""
        self.has_record, self.nominal_count = True, nominal_count
        self._launch_order = tuple(launch_order)
        self._lower()

    def set_use_orders(self, by_phase: Mapping[str, Sequence[int]]) -> None:
        """Fix the order in which each phase unshards buckets, the same on every rank."""
        orders = UseOrders(*(tuple(by_phase.get(phase, ())) for phase in UseOrders._fields))
        if orders != self._use_orders:
            self._use_orders = orders
            self._lower()
