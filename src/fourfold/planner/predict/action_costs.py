"""Action costs: what every action of a program takes on one rank of each place on the pipeline axis.

place   an index on the pipeline axis: its ranks compute and send as much as each other, and one of them stands for all
parts   of an action of the process itself: seconds by the terms of a step
extra   by what computing is longer while messages of the data axis are under way
offset  seconds of computing in front of the first use of a bucket
arrival  seconds from the begin of the phase until the bucket is there: the phase begins in time for the first one,
        and the others arrive in turn
Law: an action costs at least as much as each of its parts, and none depends on when the action begins. A phase without
stalls is one in which each bucket arrives before its use; a stall delays all that comes behind it.

How each field of a plan enters is in `PRICED` of `tests/pure/test_predict_fields.py`.
"""

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from fourfold.orders.sample_order import shard_range
from fourfold.plan.lowering import Blueprint, DataGroup
from fourfold.plan.rank_program import RankProgram
from fourfold.planner.predict.bucket_collectives import CollectiveSeconds, shape_of
from fourfold.planner.predict.bucket_prices import BucketPrices
from fourfold.planner.predict.edges import EdgeMessages
from fourfold.planner.predict.facts import ModelFacts, SegmentFacts
from fourfold.planner.predict.prediction import StepTerms
from fourfold.planner.predict.prices import Prices
from fourfold.planner.predict.stage_seconds import ZERO, SegmentPricer, StageSeconds, stage_seconds, stage_segments
from fourfold.planner.remembered import remembered
from fourfold.words.program import Action, Verb, bucket_of

# ---- gather stalls -------------------------------------------------------------------------------------------------


class GatherStalls(NamedTuple):
    """By bucket that a phase gathers, in the order of their first uses.

    waits         the longest wait for a bucket that is used no later
    last_arrival  of all buckets
    """

    offsets: tuple[float, ...] = ()
    waits: tuple[float, ...] = ()
    last_arrival: float = 0.0

    @classmethod
    def of(cls, offsets: Sequence[float], sent: Sequence[float]) -> Self:
        """`offsets`, `sent`: of each gather, in their order; the seconds that it takes."""
        if not any(sent):
            return cls()
        arrivals = [offsets[0] + end - sent[0] for end in itertools.accumulate(sent)]
        by_use = sorted(zip(offsets, arrivals, strict=True))
        waits = itertools.accumulate((arrival - offset for offset, arrival in by_use), max)
        return cls(tuple(offset for offset, _ in by_use), tuple(waits), max(arrivals))

    def waited(self, computed: float) -> float:
        """Seconds that the phase has waited when it has computed for so long."""
        num_used = bisect.bisect_right(self.offsets, computed)
        return self.waits[num_used - 1] if num_used else 0.0

    @property
    def total(self) -> float:
        return self.waits[-1] if self.waits else 0.0

    def reduction_overlap(self, remaining: float, window: float) -> float:
        """How long before the end of a backward a bucket's gradients can be sent.

        The backward computes for `window` seconds, the last `remaining` of them after these gradients. Gathers and
        reductions share a network, and gathers come first.
        """
        ready = window - remaining + self.waited(window - remaining)
        return window + self.total - max(ready, self.last_arrival)


# ---- action costs --------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """What is priced: a blueprint, the facts of its model, the blocks of its stages, on a machine.

    speeds  by place: how fast its devices compute, relative to the prices; empty: as fast
    """

    blueprint: Blueprint
    facts: ModelFacts
    stage_blocks: Sequence[range]
    prices: Prices
    batch_size: int
    speeds: Sequence[float] = ()

    @property
    def segments(self) -> list[tuple[SegmentFacts, ...]]:
        """By stage, its segments."""
        last = len(self.stage_blocks) - 1
        return [
            stage_segments(self.facts, blocks, is_first=stage == 0, is_last=stage == last)
            for stage, blocks in enumerate(self.stage_blocks)
        ]

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch on a rank with the most samples."""
        plan = self.blueprint.plan
        local = -(-self.batch_size // plan.dp)
        ranges = [shard_range(0, local, plan.microbatches, index) for index in range(plan.microbatches)]
        return tuple(stop - start for start, stop in ranges)


class PlaceCosts:
    """What the actions of one place on the pipeline axis cost, for any of its programs."""

    def __init__(self, job: Job, group: DataGroup, pricer: SegmentPricer, edges: EdgeMessages) -> None:
        self._group, self._pricer, self._edges = group, pricer, edges
        self._plan = job.blueprint.plan
        self.buckets = BucketPrices(job.blueprint, group, job.prices)
        self._sizes, self._segments = job.microbatch_sizes, job.segments
        self._speed = job.speeds[group.stage.stage] if job.speeds else 1.0
        self.between, self.slowdown = job.prices.between_actions(), job.prices.slowdown()

    # ---- what a stage computes ------------------------------------------------------------------------

    def stage(self, action: Action) -> StageSeconds:
        """What the stage of a forward or backward computes with its microbatch."""
        return self._stage(action.stage, self._sizes[action.index % len(self._sizes)])

    @remembered()
    def _stage(self, stage: int, num_samples: int) -> StageSeconds:
        return stage_seconds(self._segments[stage], self._pricer, num_samples, speed=self._speed)

    def gradient_seconds(self, action: Action) -> float:
        """What a backward takes to put its gradients into their buckets."""
        return self.buckets.gradient_seconds(action.stage, is_first=action.index % self._plan.microbatches == 0)

    def names(self, bucket: int) -> list[str]:
        return [slot.name for slot in self._group.buckets[bucket].slots]

    # ---- messages -------------------------------------------------------------------------------------

    def message(self, action: Action) -> float:
        """A message between stages, on the lane of its sender; its receipt takes no time of its own."""
        return self._edges.seconds(action, self._sizes[action.index % len(self._sizes)])

    def tie_gradient(self, action: Action) -> StepTerms:
        return ZERO._replace(bubble=self._edges.tie_seconds if action.stage == 0 else 0.0, overhead=self.between)


def slowed(slowdown: float, sent: float, window: float) -> float:
    """By how many seconds computing is longer if messages of `sent` seconds are under way in a part of it."""
    return min(sent * (1.0 - 1.0 / slowdown), window * (slowdown - 1.0))


class ProgramCosts:
    """What the actions of one rank's program cost. `parts`: of those that the process itself is busy with."""

    def __init__(self, place: PlaceCosts, actions: Sequence[Action]) -> None:
        self.place, self._index = place, RankProgram(actions)
        self._reductions: dict[Action, list[Action]] = {}
        for reduction, backward in self._index.backward_before.items():
            self._reductions.setdefault(backward, []).append(reduction)
        self.parts: dict[Action, StepTerms] = {}
        self.seconds: dict[Action, float] = {}
        self.overlaps: dict[tuple[Action, Action], float] = {}
        self._stalls: dict[Action, GatherStalls] = {}
        for action in self._index.actions:
            if action.verb in PARTS:
                self.parts[action] = PARTS[action.verb](self, action)
                self.seconds[action] = sum(self.parts[action])
            elif action.verb in COLLECTIVES:
                self.seconds[action] = self.collective(action).sent
            else:
                self.seconds[action] = place.message(action)
        self._add_gather_overlaps()

    # ---- forward and backward -------------------------------------------------------------------------

    def forward(self, action: Action) -> StepTerms:
        stage = self.place.stage(action)
        unshards = self._index.unshards_of.get(action, [])
        return self._phase(action, stage.forward, [stage.forward_until(self._names(each)) for each in unshards])

    def backward(self, action: Action) -> StepTerms:
        stage = self.place.stage(action)
        is_input = action.verb == Verb.BACKWARD_INPUT
        terms = stage.backward_input if is_input else stage.backward
        names = [self._names(each) for each in self._index.unshards_of.get(action, [])]
        phase = self._phase(action, terms, [stage.backward_until(each, is_input_half=is_input) for each in names])
        return phase if is_input else self._with_reductions(action, phase, is_weight_half=False)

    def backward_weight(self, action: Action) -> StepTerms:
        terms = self.place.stage(action).backward_weight
        terms = terms._replace(overhead=self.place.between)
        return self._with_reductions(action, terms, is_weight_half=True)

    def _phase(self, action: Action, terms: StepTerms, offsets: Sequence[float]) -> StepTerms:
        """A forward or backward with what its unshards add to it. `offsets`: of the first uses of their buckets."""
        unshards = self._index.unshards_of.get(action, [])
        if not unshards:
            return terms._replace(overhead=self.place.between)
        costs = [self.collective(each) for each in unshards]
        stalls = self._stalls[action] = GatherStalls.of(offsets, [each.sent for each in costs])
        for unshard, offset in zip(unshards, offsets, strict=True):
            # Beyond the first one, the wait for a bucket is a part of the phase.
            self.overlaps[action, unshard] = offset if unshard == unshards[0] else offset + stalls.total
        own, sent = sum(each.own for each in costs), sum(each.sent for each in costs)
        exposed = terms.exposed + own + slowed(self.place.slowdown, sent, sum(terms)) + stalls.total
        return terms._replace(exposed=exposed, overhead=self.place.between)

    def _with_reductions(self, action: Action, terms: StepTerms, *, is_weight_half: bool) -> StepTerms:
        """A backward with its gradients, and with what its reductions add to it."""
        place, stage = self.place, self.place.stage(action)
        terms = terms._replace(compute=terms.compute + place.gradient_seconds(action))
        reductions = self._reductions.get(action, [])
        if not reductions:
            return terms
        costs = [self.collective(each) for each in reductions]
        remaining = [stage.remaining(self._names(each), is_weight_half=is_weight_half) for each in reductions]
        window, is_round = max(remaining), action != self._index.last[action.verb, action.stage]
        # After a round that is not the last one, the next forward computes while its messages are under way.
        longest = window + (sum(stage.forward) if is_round else 0.0)
        extra = slowed(place.slowdown, sum(each.sent for each in costs), longest)
        stretch = 1.0 + min(extra, window) / window if window else 1.0
        stalls = self._stalls.get(action, GatherStalls())
        computed = sum(terms) - stalls.total + extra
        for reduction, seconds in zip(reductions, remaining, strict=True):
            self.overlaps[reduction, action] = stalls.reduction_overlap(seconds * stretch, computed)
        return terms._replace(exposed=terms.exposed + extra + sum(each.own for each in costs))

    def _names(self, action: Action) -> list[str]:
        return self.place.names(bucket_of(action, self.place.buckets.num_buckets))

    # ---- everything else ------------------------------------------------------------------------------

    def update(self, action: Action) -> StepTerms:
        bucket = bucket_of(action, self.place.buckets.num_buckets)
        gathers = Action(Verb.GATHER, action.stage, action.index) in self._index.actions
        own = self.place.buckets.collectives.gather(bucket).own if gathers else 0.0
        return self.place.buckets.update(bucket)._replace(exposed=own)

    def collective(self, action: Action) -> CollectiveSeconds:
        collectives = self.place.buckets.collectives
        price = {
            Verb.REDUCE: collectives.reduce,
            Verb.GATHER: collectives.gather,
            Verb.UNSHARD: collectives.unshard,
            Verb.PUSH: collectives.push,
        }[action.verb]
        return price(bucket_of(action, self.place.buckets.num_buckets))

    def _add_gather_overlaps(self) -> None:
        """Weights that the step before has updated last are used first: a forward waits for them in turn."""
        gathers = [each for each in self._index.previous_step if each.verb == Verb.GATHER]
        first = next((each for each in self._index.actions if each.verb == Verb.FORWARD), None)
        if first is not None:
            stage = self.place.stage(first)
            self.overlaps |= {(first, each): stage.forward_until(self._names(each)) for each in gathers}


PARTS: Mapping[Verb, Callable[[ProgramCosts, Action], StepTerms]] = {
    Verb.FORWARD: ProgramCosts.forward,
    Verb.BACKWARD: ProgramCosts.backward,
    Verb.BACKWARD_INPUT: ProgramCosts.backward,
    Verb.BACKWARD_WEIGHT: ProgramCosts.backward_weight,
    Verb.UPDATE: ProgramCosts.update,
    Verb.MEASURE: lambda costs, action: costs.place.buckets.measure(action),
    Verb.PULL: lambda costs, action: costs.place.buckets.pull(action.index),
    Verb.TIE_GRADIENT: lambda costs, action: costs.place.tie_gradient(action),
}
"""Of the actions that the process itself is busy with."""
COLLECTIVES = (Verb.REDUCE, Verb.GATHER, Verb.UNSHARD, Verb.PUSH)


def pricer_of(job: Job) -> SegmentPricer:
    """The prices of segments, for all places."""
    plan, topology = job.blueprint.plan, job.blueprint.topology
    ranks = plan.mesh.peers(0, "dp")
    group = job.blueprint.group_of(0)
    data = shape_of(topology, ranks, shares_memory=group.hosts.shares_memory)
    return SegmentPricer(job.prices, plan, data)


def place_groups(blueprint: Blueprint) -> tuple[DataGroup, ...]:
    """By place on the pipeline axis: the data group that stands for all of its tensor places, one with most to send."""
    by_place: dict[int, list[DataGroup]] = {}
    for group in blueprint.groups:
        by_place.setdefault(group.stage.stage, []).append(group)
    return tuple(max(by_place[place], key=_weight) for place in range(blueprint.plan.pp))


def _weight(group: DataGroup) -> tuple[int, int]:
    return group.hosts.num_hosts, sum(bucket.num_bytes for bucket in group.buckets)
