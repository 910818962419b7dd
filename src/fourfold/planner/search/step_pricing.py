"""Step pricing: what plans take, by the facts of a model and the prices of a machine.

busy   seconds that all places of the pipeline together compute with one microbatch
facts_key  equal for plans whose facts are the same
place  of the pipeline: consecutive ranks, so whole hosts or a part of one; it computes as fast as its slowest host
kind   places that compute equally fast
order  of the hosts, in which their ranks are numbered
estimate   a closed form, for the many plans of a search
simulate   the program of one rank of each kind, for the few best
floor      seconds that no step of a plan's group can be shorter than: the mean of what its places compute
Law: equal segments are priced once for all plans that compute them alike.
Law: every host is used once, and places that share a host are neighbours.
Law: an estimate and a simulation have the same prices, so one is the other up to an error that a search measures.

Source: HetPipe (Park et al., 2005.14038, §3): each stage of a pipeline has GPUs of one kind.

chain      the blocks of a model, with what one microbatch takes on each and what each holds
submesh    the devices of a place: there are `num_places` equal ones of a kind
division   by stage: where its blocks stop, and the kind of submesh that computes it
step       the seconds of all stages once, and those of the slowest one for each further microbatch
Law: no division of the chain that fits has a shorter step.

Dynamic programming over (stages, blocks, submeshes used): O(blocks² · stages · kinds) transitions. A state keeps the
divisions of which none is both shorter in all and faster at its slowest stage than another: the step is monotone in
both, so the best one is among them.
Sources: PipeDream (Narayanan et al., SOSP 2019, §3.1) and DAPPLE (2007.01045, §4) minimize the slowest stage over
boundaries and numbers of devices; Alpa (2201.12023, §5.2) adds the sum and kinds of submeshes; HetPipe (2005.14038)
has places of unlike GPUs. All places of a plan have equally many devices: submeshes differ in speed and memory.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from fourfold.axes.pipeline.rules.spec import owner_of
from fourfold.plan.check import legality_problems
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import Cluster, topology_of
from fourfold.planner.predict.estimate import Estimator, flights_of
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.prediction import Prediction, StepTerms
from fourfold.planner.predict.prices import Prices
from fourfold.planner.predict.stage_table import place_key
from fourfold.planner.predict.step import predict_step
from fourfold.planner.remembered import remembered
from fourfold.words.errors import Problem

# ---- Stages: how a chain of blocks is best divided among the places of a pipeline, whose devices may differ ---------

ROUNDING = 1e-9  # of sums in another order


class Segment(NamedTuple):
    """A block, or an end of the chain.

    seconds      of one microbatch, forward and backward, on a device of speed 1
    held_bytes   weights, gradients and states
    saved_bytes  activations of one microbatch
    """

    seconds: float
    held_bytes: float = 0.0
    saved_bytes: float = 0.0


class Chain(NamedTuple):
    """What is divided. `edge_seconds`: of the messages of one microbatch between two stages, in both directions."""

    first: Segment
    blocks: tuple[Segment, ...]
    last: Segment
    edge_seconds: float = 0.0


class Submesh(NamedTuple):
    """Places of the pipeline with equal devices. `speed`: in relation to that of the chain's seconds."""

    num_places: int
    speed: float = 1.0
    memory_bytes: float = math.inf


class Division(NamedTuple):
    """By stage: where its blocks stop, and the index of its submesh. That of the first blocks has fewer stages."""

    stops: tuple[int, ...]
    submeshes: tuple[int, ...]
    slowest: float
    total: float

    def step_seconds(self, microbatches: int) -> float:
        return self.total + (microbatches - 1) * self.slowest

    @property
    def counts(self) -> str:
        """The division as a plan's `stages`: how many blocks each stage has."""
        return ",".join(str(stop - start) for start, stop in zip((0, *self.stops), self.stops, strict=False))


_State = tuple[int, tuple[int, ...]]
"""The number of blocks that are divided, and by kind the number of submeshes that are used."""


def best_division(
    chain: Chain,
    submeshes: Sequence[Submesh],
    *,
    microbatches: int,
    in_flight: Sequence[int],
    known_seconds: float = math.inf,
    order: Sequence[int] | None = None,
) -> Division | None:
    """The division with the shortest step; None: none fits, or none is shorter than `known_seconds`.

    submeshes      by kind; together at least as many as there are stages
    in_flight      by stage: the microbatches whose activations are alive at once; its length is the number of stages
    known_seconds  the step of a division that is known already
    order          by stage: the kind of its submesh, if that is not open
    """
    # All microbatches pass the slowest stage: a division with a slower one has a longer step than the known one.
    ranges = _StageRanges(chain, len(in_flight), known_seconds / microbatches, max(each.speed for each in submeshes))
    states: dict[_State, list[Division]] = {(0, (0,) * len(submeshes)): [Division((), (), 0.0, 0.0)]}
    for stage, num_saved in enumerate(in_flight):
        following: dict[_State, list[Division]] = {}
        for (start, used), divisions in states.items():
            for kind in range(len(submeshes)) if order is None else (order[stage],):
                submesh = submeshes[kind]
                if used[kind] == submesh.num_places:
                    continue
                now_used = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                for stop, seconds in ranges.stops(stage, start, submesh, num_saved):
                    kept = following.setdefault((stop, now_used), [])
                    for each in divisions:
                        _extend(kept, each, stop, kind, seconds)
        states = following
    found = [each for divisions in states.values() for each in divisions]
    best = min(found, key=lambda each: each.step_seconds(microbatches), default=None)
    return best if best is not None and best.step_seconds(microbatches) < known_seconds else None


def division_of(chain: Chain, stops: Sequence[int], speeds: Sequence[float]) -> Division:
    """A division that is known, with what it takes. `speeds`: by stage."""
    ranges, starts = _StageRanges(chain, len(stops)), (0, *stops[:-1])
    seconds = [
        ranges.seconds(stage, start, stop) / speed
        for stage, (start, stop, speed) in enumerate(zip(starts, stops, speeds, strict=True))
    ]
    return Division(tuple(stops), (0,) * len(stops), max(seconds), sum(seconds))


class _StageRanges:
    """What consecutive blocks take as a stage, from sums over the chain.

    limit       of a stage's seconds
    best_speed  of any submesh
    """

    def __init__(self, chain: Chain, num_stages: int, limit: float = math.inf, best_speed: float = 1.0) -> None:
        self._chain, self._num_stages, self._num_blocks = chain, num_stages, len(chain.blocks)
        self._limit, self._best_speed = limit, best_speed
        self._sums = [
            list(accumulate((block[index] for block in chain.blocks), initial=0.0))
            for index in range(len(Segment._fields))
        ]

    def stops(self, stage: int, start: int, submesh: Submesh, num_saved: int) -> Iterator[tuple[int, float]]:
        """Where a stage that begins with a block may stop, and its seconds."""
        left = self._num_stages - 1 - stage  # stages that need a block each
        first = max(start + 1, self._first_stop(left)) if left else self._num_blocks
        for stop in range(first, self._num_blocks - left + 1):
            seconds = self.seconds(stage, start, stop) / submesh.speed
            held = self._total(1, stage, start, stop) + num_saved * self._total(2, stage, start, stop)
            if seconds > self._limit or held > submesh.memory_bytes:
                return
            yield stop, seconds

    def _first_stop(self, left: int) -> int:
        """The least stop behind which the blocks are not too many for so many stages within the limit."""
        seconds, most = self._sums[0], left * self._limit * self._best_speed
        if most == math.inf:
            return 0
        return bisect.bisect_left(seconds, seconds[-1] - most * (1 + ROUNDING))

    def seconds(self, stage: int, start: int, stop: int) -> float:
        """Of one microbatch on a stage, at speed 1."""
        num_edges = (stage > 0) + (stage < self._num_stages - 1)
        return self._total(0, stage, start, stop) + num_edges * self._chain.edge_seconds

    def _total(self, index: int, stage: int, start: int, stop: int) -> float:
        """One of the numbers of a segment, of all segments of a stage."""
        ends = (self._chain.first[index] if stage == 0 else 0.0) + (
            self._chain.last[index] if stage == self._num_stages - 1 else 0.0
        )
        return self._sums[index][stop] - self._sums[index][start] + ends


def _extend(kept: list[Division], before: Division, stop: int, kind: int, seconds: float) -> None:
    """Add a division with one more stage to a state, unless another is as good in both; drop those that are worse."""
    slowest, total = max(before.slowest, seconds), before.total + seconds
    if any(each.slowest <= slowest and each.total <= total for each in kept):
        return
    kept[:] = [each for each in kept if each.slowest < slowest or each.total < total]
    kept.append(Division((*before.stops, stop), (*before.submeshes, kind), slowest, total))


# ---- unequal hosts -------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """The places of a pipeline.

    kinds   with their speeds, fastest first; with equal hosts there is one
    order   by place: its kind, where hosts have several places each; None: any order will do
    """

    kinds: tuple[Submesh, ...]
    order: tuple[int, ...] | None = None

    @property
    def num_places(self) -> int:
        return sum(kind.num_places for kind in self.kinds)

    @property
    def total_speed(self) -> float:
        """Of all places together."""
        return sum(kind.num_places * kind.speed for kind in self.kinds)


def places_of(cluster: Cluster, num_places: int) -> Places:
    """The places into which a cluster is divided: hosts that are alike are together, the fastest first."""
    speeds = sorted(cluster.host_speeds or [1.0] * cluster.hosts, reverse=True)
    size, per_host = cluster.num_devices // num_places, cluster.devices_per_host
    if size % per_host == 0:
        count = size // per_host
        of_places = [speeds[(place + 1) * count - 1] for place in range(num_places)]
    elif per_host % size == 0:
        of_places = [speed for speed in speeds for _ in range(per_host // size)]
    else:  # places lie across the borders of hosts, and each may have ranks on a slow one
        of_places = [speeds[-1]] * num_places
    kinds = sorted(set(of_places), reverse=True)
    order = tuple(kinds.index(speed) for speed in of_places) if size < per_host else None
    return Places(tuple(Submesh(of_places.count(speed), speed) for speed in kinds), order)


def assign(places: Places, seconds: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """By place: its kind, so that the step is shortest. `seconds`: what each place computes, at speed 1."""
    if places.order is not None or len(places.kinds) == 1:
        return places.order or (0,) * places.num_places
    # A chain of as many blocks as places has one division; only the kinds are open.
    nothing = Segment(0.0)
    found = best_division(
        Chain(nothing, tuple(map(Segment, seconds)), nothing),
        places.kinds,
        microbatches=microbatches,
        in_flight=[1] * len(seconds),
    )
    assert found is not None
    return found.submeshes


def host_order(cluster: Cluster, kinds: Sequence[int]) -> tuple[int, ...]:
    """The hosts, by index, in the order of their ranks. `kinds`: of the places, in their order."""
    fastest_first = sorted(range(cluster.hosts), key=lambda host: -cluster.host_speeds[host])
    if cluster.hosts % len(kinds):  # hosts have several places each, or places lie across their borders
        return tuple(fastest_first)
    count = cluster.hosts // len(kinds)
    ranked = sorted(range(len(kinds)), key=lambda place: kinds[place])
    of_place = {place: fastest_first[number * count : (number + 1) * count] for number, place in enumerate(ranked)}
    return tuple(host for place in range(len(kinds)) for host in of_place[place])


# ---- step pricing --------------------------------------------------------------------------------------------------


facts_key = attrgetter("tp", "cp", "ring", "ulysses", "sequence_parallel", "dims", "precision")
WORTH_FITTING = 1.5  # a division by which a plan fits may make it slower by this factor
WORTH_A_LOOK = 1.001  # a slowest stage within this factor of the least possible one is not divided again


class StepPricing:
    """What plans of a task take on all devices of a cluster.

    Everything but `problems` and `slowdown` raises PlanError for a plan that the model refuses.
    """

    def __init__(self, source: FactsSource, prices: Prices, cluster: Cluster) -> None:
        self._source, self._prices, self._cluster = source, prices, cluster
        self._topology = topology_of(cluster, cluster.num_devices)
        self._estimator = Estimator(source, prices, self._topology)

    def on_devices(self, num_devices: int) -> "StepPricing":
        """The same machine with so many devices. Raises PlanError if it cannot have as many."""
        return StepPricing(self._source, self._prices, self._cluster.resized(num_devices))

    def slowdown(self) -> float:
        """By what computing is slower while a rank communicates: an estimate may contain it, a floor does not."""
        return self._prices.slowdown()

    def floor(self, plan: Plan) -> float:
        """Whatever the schedule, zero, shard and update of the plan are."""
        return plan.microbatches * sum(self._segment_seconds(plan)) / self._places(plan.pp).total_speed

    def _samples(self, plan: Plan) -> float:
        """Of a microbatch on a data rank, in the mean."""
        return self._source.batch_size / plan.dp / plan.microbatches

    def _segment_seconds(self, plan: Plan) -> list[float]:
        """By segment: forward and backward of one microbatch, at speed 1."""
        return self._estimator.stages.segment_seconds(plan, self._samples(plan))

    def problems(self, plan: Plan) -> list[Problem]:
        """Why the plan cannot be carried out."""
        return legality_problems(plan, self._source.specs(plan), self._topology, self._source.update_spec)

    def terms(self, plan: Plan) -> StepTerms:
        """Of its estimate: what a rank holds takes longer to find out."""
        return self._estimator.terms(plan, self._speeds(plan))

    def estimate(self, plan: Plan) -> Prediction:
        return _with_reserve(self._estimator.estimate(plan, self._speeds(plan)), self._cluster.reserve_bytes)

    def simulate(self, plan: Plan) -> Prediction:
        blueprint = lower(plan, self._source.specs(plan), self._topology, self._source.update_spec)
        reserve, speeds = self._cluster.reserve_bytes, self._speeds(plan)
        return predict_step(blueprint, self._source, self._prices, reserve_bytes=reserve, speeds=speeds)

    # ---- unequal hosts -----------------------------------------------------------------------------

    def host_order(self, plan: Plan) -> tuple[int, ...]:
        """The hosts in the order of their ranks, for which the plan is priced; empty: they are equal."""
        return host_order(self._cluster, self._kinds(plan)) if self._cluster.host_speeds else ()

    def _speeds(self, plan: Plan) -> tuple[float, ...]:
        """By place; empty: equal hosts."""
        places = self._places(plan.pp)
        return tuple(places.kinds[kind].speed for kind in self._kinds(plan)) if self._cluster.host_speeds else ()

    def _kinds(self, plan: Plan) -> tuple[int, ...]:
        return self._kinds_of(self._place_seconds(plan), plan.microbatches)

    @remembered()
    def _kinds_of(self, place_seconds: tuple[float, ...], microbatches: int) -> tuple[int, ...]:
        return assign(self._places(len(place_seconds)), place_seconds, microbatches)

    @remembered()
    def _places(self, num_places: int) -> Places:
        return places_of(self._cluster, num_places)

    @remembered(lambda self, plan: (place_key(plan), self._samples(plan)))
    def _place_seconds(self, plan: Plan) -> tuple[float, ...]:
        """By place: what it computes of a microbatch, at speed 1."""
        seconds = self._segment_seconds(plan)
        return tuple(sum(sum(seconds[a:b]) for a, b in own) for own in self._estimator.stages.ranges_of(plan))

    # ---- stages ------------------------------------------------------------------------------------

    def stage_blocks(self, plan: Plan) -> Sequence[range]:
        """By stage: the blocks that it computes."""
        return self._source.stage_blocks(plan)

    def balance(self, plan: Plan) -> float:
        """What the places of the pipeline compute in the mean, over what the busiest one computes."""
        places, seconds = self._places(plan.pp), self._place_seconds(plan)
        slowest = max(each / places.kinds[kind].speed for each, kind in zip(seconds, self._kinds(plan), strict=True))
        return sum(seconds) / places.total_speed / slowest

    def divisions(self, plan: Plan, limit_bytes: float) -> list[str]:
        """Values of `stages` that are better for a plan with several stages than its own: the best one by the bytes of
        its estimate, unless its own is as good.
        """
        places = self._places(plan.pp)
        if plan.interleave > 1 and len(places.kinds) > 1:
            return []  # a place has stages at several positions of the chain
        predicted, stops = self.estimate(plan), [blocks.stop for blocks in self.stage_blocks(plan)]
        chain, memory = self._chain(plan, predicted), predicted.memory
        own = division_of(chain, stops, [places.kinds[kind].speed for kind in self._kinds(plan)] * plan.interleave)
        fits, has_memory = memory.total <= limit_bytes, plan.interleave == 1
        if fits and own.slowest <= WORTH_A_LOOK * _least_slowest(chain, own, places):
            return []
        # Several stages of a place share its memory: how much each may hold, only the estimate says.
        room = limit_bytes - memory.buffers - memory.temporaries - memory.reserve if has_memory else math.inf
        found = best_division(
            chain,
            [kind._replace(num_places=kind.num_places * plan.interleave, memory_bytes=room) for kind in places.kinds],
            microbatches=plan.microbatches,
            in_flight=_in_flight(plan),
            known_seconds=own.step_seconds(plan.microbatches) * (1.0 if fits or not has_memory else WORTH_FITTING),
            order=places.order if has_memory else None,
        )
        return [] if found is None or found.stops == own.stops else [found.counts]

    def _chain(self, plan: Plan, predicted: Prediction) -> Chain:
        """The segments with their seconds, and the bytes that the estimate has for their elements."""
        facts, samples = self._source.facts(plan), self._samples(plan)
        elements = self._elements(plan)
        by_place = [0.0] * plan.pp
        for stage, blocks in enumerate(self.stage_blocks(plan)):
            by_place[owner_of(stage, plan.pp)] += sum(elements[1 + blocks.start : 1 + blocks.stop])
        by_place[0] += elements[0]
        by_place[-1] += elements[-1]
        fullest = predicted.memory
        bytes_per_element = (fullest.weights + fullest.gradients + fullest.states) / max(by_place)
        first, *blocks, last = (
            Segment(seconds, bytes_per_element * count, each.saved_bytes[plan.recompute] * samples)
            for each, seconds, count in zip(facts.segments, self._segment_seconds(plan), elements, strict=True)
        )
        crosses = self._topology.size // plan.pp >= self._cluster.devices_per_host
        edge = self._prices.edge(facts.boundary_bytes * samples, crosses_hosts=crosses)
        return Chain(first, tuple(blocks), last, 2 * edge)

    @remembered(lambda _, plan: facts_key(plan))
    def _elements(self, plan: Plan) -> list[int]:
        """By segment: the elements of its parameters on a rank."""
        counts = {spec.name: spec.num_elements for spec in self._source.specs(plan)}
        return [sum(counts.get(name, 0) for name in each.params) for each in self._source.facts(plan).segments]


def _with_reserve(prediction: Prediction, reserve_bytes: float) -> Prediction:
    by_stage = tuple(parts._replace(reserve=reserve_bytes) for parts in prediction.by_stage)
    return Prediction(prediction.plan, prediction.terms, by_stage, prediction.sent_bytes)


def _least_slowest(chain: Chain, division: Division, places: Places) -> float:
    """What the slowest stage of any division takes at least: as much as the mean, and as the longest block."""
    mean = division.total / len(division.stops) if len(places.kinds) == 1 else 0.0
    return max(mean, max(block.seconds for block in chain.blocks) / places.kinds[0].speed)


def _in_flight(plan: Plan) -> list[int]:
    """By stage: the microbatches whose activations its place keeps."""
    flights = flights_of(plan.schedule, plan.pipeline_spec)
    by_place = [max(1, math.ceil(each.saved + each.deferred)) for each in flights]
    return [by_place[owner_of(stage, plan.pp)] for stage in range(plan.num_stages)]
