"""Step programs: this rank's programs, before and after what the first step learns.

record  what later steps keep of the first: the launch order of buckets, the nominal count, the use orders of unshards
Law: what is not in the program does not happen, except a use of weights out of turn, which is counted.
"""

from collections.abc import Mapping, Sequence

from fourfold.axes.data.rules.step_program import UseOrders
from fourfold.plan.lowering import Blueprint
from fourfold.plan.step_programs import StepRecord
from fourfold.words.program import Action, Program, Verb

NOT_LEARNT = UseOrders((), (), ())


class StepPrograms:
    """The programs of one rank. Orders are by stage."""

    def __init__(self, blueprint: Blueprint, rank: int) -> None:
        self.blueprint, self._rank = blueprint, rank
        self._launch_orders: dict[int, tuple[int, ...]] = {}
        self._use_orders = dict.fromkeys(self._num_buckets(), NOT_LEARNT)
        self._learnt: Mapping[int, Mapping[str, Sequence[int]]] = {}
        """What use orders were made of."""
        self.nominal_count: float | None = None
        """What gradients are divided by in backward; None: the next step measures it."""
        self.has_record = False
        self._lower()

    def _lower(self) -> None:
        self._programs = self.blueprint.programs(StepRecord(self._launch_orders, self._use_orders))

    @property
    def of_ranks(self) -> Program:
        """By rank: the actions of a step; with local steps: of one at whose end weights are averaged."""
        return self._programs.step

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
    def inference(self) -> tuple[Action, ...]:
        """The forwards of an evaluation, where weights are whole already."""
        return tuple(action for action in self.forward_only if action.verb != Verb.UNSHARD)

    def of_step(self, number: int, *, measures_count: bool = False) -> tuple[Action, ...]:
        """The program of step `number`, from 1. `measures_count`: also if the nominal count is known."""
        is_local = number % self.blueprint.sync_interval > 0
        has_count = self.nominal_count is not None and not measures_count
        return self._programs.of_step(is_local=is_local, has_nominal_count=has_count)[self._rank]

    @property
    def reduction_order(self) -> tuple[int, ...]:
        """The order in which this rank's program launches its buckets."""
        record = StepRecord(self._launch_orders)
        return self.blueprint.step_spec(self.blueprint.group_of(self._rank), record).reduction_order

    @property
    def launch_order(self) -> list[int]:
        """The order of the reductions, as recorded, stage after stage; empty before.

        Buckets are numbered from the first stage to the last.
        """
        firsts = self._first_buckets()
        return [firsts[stage] + bucket for stage, order in sorted(self._launch_orders.items()) for bucket in order]

    def split_order(self, order: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """What `launch_order` returned, by stage; empty if it is not of these buckets."""
        orders: dict[int, tuple[int, ...]] = {}
        for stage, first in self._first_buckets().items():
            num_buckets = self._num_buckets()[stage]
            orders[stage] = tuple(bucket - first for bucket in order[first : first + num_buckets])
            if sorted(orders[stage]) != list(range(num_buckets)):
                return {}
        return orders if sum(map(len, orders.values())) == len(order) else {}

    def _num_buckets(self) -> dict[int, int]:
        return {group.stage.stage: len(group.buckets) for group in self.blueprint.groups}

    def _first_buckets(self) -> dict[int, int]:
        counts = self._num_buckets()
        return {stage: sum(counts[each] for each in counts if each < stage) for stage in sorted(counts)}

    def set_record(self, launch_orders: Mapping[int, Sequence[int]], nominal_count: float | None) -> None:
        """Fix the launch orders and the nominal count for all later steps, the same on every rank."""
        self.has_record, self.nominal_count = True, nominal_count
        self._launch_orders = {stage: tuple(order) for stage, order in launch_orders.items()}
        self._lower()

    def set_use_orders(self, by_stage: Mapping[int, Mapping[str, Sequence[int]]]) -> None:
        """Fix the order in which each phase unshards buckets, the same on every rank of a stage."""
        if by_stage == self._learnt:  # as after nearly every step
            return
        self._learnt = by_stage
        self._use_orders = {
            stage: UseOrders(*(tuple(by_phase.get(phase, ())) for phase in UseOrders._fields))
            for stage, by_phase in by_stage.items()
        }
        self._lower()
