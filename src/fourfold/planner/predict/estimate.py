"""Estimates: a step in closed form, without lowering and simulation, for a search over many plans.

extras  of each microbatch: waits for gathered weights, reductions after every backward, what messages slow down
tail    from the last backward on: reductions that nothing hides; then updates and gathers
cycle  from one microbatch to the next once the pipeline is full: the slowest place, or a round trip over the
       microbatches that are in flight meanwhile
start  of a place: when its first forward begins; end: when its last backward has ended. The first place begins at 0
Law: an estimate is within ESTIMATE_ERROR of the prediction. So a search loses nothing if it predicts plans in the order
of their estimates, and ends with the first whose estimate is above (1 + ESTIMATE_ERROR) times the best prediction: what
is behind it takes longer than that. Of estimates alone it must keep those up to (1 + e) / (1 − e) times the least one.
Law: with one bucket, or with messages that are hidden as a whole, the forms of a place are the simulated times. With
equal stages and no messages those of a pipeline are the schedules' own (`axes/pipeline/rules/schedules.py`).

What depends on few fields of a plan is kept in tables: places (`stage_table.py`) and buckets (`bucket_table.py`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from fourfold.axes.pipeline.rules.schedules import ASYNCHRONOUS
from fourfold.axes.pipeline.rules.spec import PipelineSpec
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.action_costs import slowed
from fourfold.planner.predict.bucket_collectives import shape_of
from fourfold.planner.predict.bucket_table import BucketTable, Extras, PlaceData, Wait
from fourfold.planner.predict.edges import EdgeMessages
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.prediction import MemoryParts, Prediction, StepTerms
from fourfold.planner.predict.prices import GroupShape, Prices
from fourfold.planner.predict.stage_seconds import add_terms, scale_terms, shorten_waits
from fourfold.planner.predict.stage_table import PlaceCompute, StageTable
from fourfold.planner.remembered import remembered
from fourfold.words.program import Action, Verb

# ---- pipeline forms ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlaceTimes:
    """Seconds by place: of a microbatch on all its stages, and of messages to the next place, in each direction.

    edges  one for each boundary between places; with interleaving, from the last one back to the first too
    """

    forwards: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    edges: Sequence[float]

    @cached_property
    def totals(self) -> list[float]:
        return [sum(each) for each in zip(self.forwards, self.inputs, self.weights, strict=True)]

    @cached_property
    def backwards(self) -> list[float]:
        return [first + second for first, second in zip(self.inputs, self.weights, strict=True)]


class PipelineSeconds(NamedTuple):
    """By place. `pace`: from one backward of a place to its next one, once the pipeline is full."""

    starts: Sequence[float]
    ends: Sequence[float]
    pace: float


def _cycle(times: PlaceTimes, spec: PipelineSpec) -> float:
    """Of 1F1B: place i has p − i microbatches in flight, each of which goes to the last place and back."""
    totals, cycle = times.totals, max(times.totals)
    round_trip = 0.0
    for place in reversed(range(spec.pp)):
        round_trip += totals[place] + (2 * times.edges[place] if place < spec.pp - 1 else 0.0)
        if spec.pp - place < spec.microbatches:
            cycle = max(cycle, round_trip / (spec.pp - place))
    return max(cycle, 2 * max(times.edges[: spec.pp - 1]))  # a lane sends in both directions


def _until(times: Sequence[float], edges: Sequence[float], spec: PipelineSpec) -> list[float]:
    """By place: seconds of the hops from the first place to it, each through one stage and one message."""
    hops = [seconds / spec.interleave + edge for seconds, edge in zip(times, edges, strict=False)]
    return list(itertools.accumulate(hops[: spec.pp - 1], initial=0.0))


def _from_first_to_first(times: PlaceTimes, spec: PipelineSpec, seconds: float, pace: float) -> PipelineSeconds:
    """Places begin when the first forward reaches them; they end one after the other, the first place last."""
    ends = [seconds - each for each in _until(times.backwards, times.edges, spec)]
    return PipelineSeconds(_until(times.forwards, times.edges, spec), ends, pace)


def _gpipe(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    edges = times.edges[: spec.pp - 1]
    ramp = sum(times.totals) + 2 * sum(edges)
    forward, backward = max(*times.forwards, *edges), max(*times.backwards, *edges)
    return _from_first_to_first(times, spec, ramp + (spec.microbatches - 1) * (forward + backward), backward)


def _one_f_one_b(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    seconds = max(_while_busy(times, spec, place) for place in range(spec.pp))
    cycle = _cycle(times, spec)
    messages = 2 * sum(times.edges[: spec.pp - 1]) + (spec.microbatches - 1) * (cycle - max(times.totals))
    return _from_first_to_first(times, spec, seconds + messages, cycle)


def _while_busy(times: PlaceTimes, spec: PipelineSpec, place: int) -> float:
    """How long 1F1B takes if this place is the slowest: it waits for the first gradient and for the last one, while it
    computes the forwards of its warm-up, and the backwards that are left.
    """
    totals, m, warm_up = times.totals, spec.microbatches, spec.pp - 1 - place
    before, behind = sum(totals[:place]), sum(totals[place + 1 :])
    if warm_up >= m:  # one wait, for the only gradients that come
        return before + m * totals[place] + behind
    waits = [max(0.0, behind - warm_up * each[place]) for each in (times.forwards, times.backwards)]
    return before + m * totals[place] + sum(waits)


def _interleaved(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    """Ramps go through one stage of each place; a warm-up of twice as many hides the messages in between."""
    slowest = max(times.totals)
    chains = 2 * (sum(times.edges[: spec.pp - 1]) + (spec.interleave - 1) * sum(times.edges[: spec.pp]))
    ramp = (sum(times.totals) - slowest) / spec.interleave + chains
    return _from_first_to_first(times, spec, ramp + spec.microbatches * slowest, slowest)


def _zero_bubble(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    """The slowest place waits for the others, and fills as many of the waits with halves of weights as it may defer."""
    p, slowest = spec.pp, max(range(spec.pp), key=times.totals.__getitem__)
    num_deferred = min(spec.max_in_flight or p, spec.microbatches, 2 * p - 1) - 1
    others = sum(times.forwards) + sum(times.inputs) - times.forwards[slowest] - times.inputs[slowest]
    bubble = max(0.0, others - num_deferred * times.weights[slowest]) + 2 * sum(times.edges[: p - 1])
    starts = _until(times.forwards, times.edges, spec)
    span = bubble + spec.microbatches * times.totals[slowest]
    # With the limit of H1 all places end together, with that of H2 they end as they have begun.
    staggered = max(0.0, num_deferred - (p - 1)) / (p - 1)
    return PipelineSeconds(starts, [span + staggered * start for start in starts], times.totals[slowest])


def _undrained(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    endless = spec._replace(microbatches=spec.pp + spec.microbatches)
    cycle = _cycle(times, endless)
    return PipelineSeconds([0.0] * spec.pp, [spec.microbatches * cycle] * spec.pp, cycle)


FORMS: dict[str, Callable[[PlaceTimes, PipelineSpec], PipelineSeconds]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "pipedream": _undrained,
    "2bw": _undrained,
    "written": _one_f_one_b,  # whatever its order is
}


class Flight(NamedTuple):
    """How many microbatches a place keeps at most, in those of one microbatch on all its stages.

    deferred  of these, between the halves of their backward
    """

    saved: float
    deferred: float = 0.0


def flights_of(schedule: str, spec: PipelineSpec) -> list[Flight]:
    """By place."""
    p, m, v = spec.pp, spec.microbatches, spec.interleave
    if schedule == "gpipe":
        return [Flight(m)] * p
    if schedule == "zero-bubble":
        # As in 1F1B, or twice as many, are on their way to the last place and back; the others wait for their W.
        limit = min(m, spec.max_in_flight or p)
        on_the_way = [2 * (p - 1 - place) + 1 if limit > p else p - place for place in range(p)]
        return [Flight(min(limit, each), max(0, limit - each)) for each in on_the_way]
    if schedule == "interleaved":
        return [Flight(min(m * v, 2 * (p - 1 - place) + (v - 1) * p + 1) / v) for place in range(p)]
    filled = p if schedule in ASYNCHRONOUS else m
    return [Flight(min(filled, p - place)) for place in range(p)]


# ---- place forms ---------------------------------------------------------------------------------------------------

ROUNDING = 1e-9


class PlaceWork(NamedTuple):
    """What a place computes, what the data axis costs there, and what it adds to each microbatch."""

    compute: PlaceCompute
    data: PlaceData
    extra: Extras


class Tail(NamedTuple):
    """Seconds behind the last backward until the gradients of the first bucket are there, and those of all."""

    first: float
    all: float


def divides_backward(plan: Plan) -> bool:
    """As the plan's own property, but without making the lists of zero-bubble, which takes long."""
    return plan.pp > 1 and (plan.schedule == "zero-bubble" or (plan.schedule == "written" and plan.divides_backward))


def has_rounds(plan: Plan) -> bool:
    """Whether gradients are reduced after every backward."""
    return plan.zero >= 2 and plan.num_shards > 1


def extras(plan: Plan, compute: PlaceCompute, data: PlaceData, slowdown: float) -> Extras:
    """What a microbatch takes in addition, except for the reductions of the last backward."""
    if not (data.unshard.own or data.unshard.sent or has_rounds(plan)):
        return Extras(gradients=data.gradients[1])
    forward, backward = compute.forward_seconds, compute.backward_seconds
    # All buckets of the first segment of a stage are waited for; then others come while those before them are used.
    own, sent = data.unshard.own, data.unshard.sent
    in_front = min(1.0, plan.interleave / max(1, min(data.num_buckets, compute.num_segments)))
    waits = [
        own + slowed(slowdown, sent, phase) + max(in_front * sent, sent - (1.0 - in_front) * phase)
        for phase in (forward, backward)
    ]
    if has_rounds(plan):
        waits[1] += data.reduce.own + slowed(slowdown, data.reduce.sent, (1.0 - in_front) * backward + forward)
    return Extras(waits[0], waits[1], data.gradients[1])


def tail(plan: Plan, place: PlaceWork, slowdown: float) -> Tail:
    """The reductions that follow the last backward of a place."""
    if plan.sync == "local":
        return Tail(0.0, 0.0)
    compute, data, extra = place
    # The last backward is that of the first stage; its buckets are ready one after the other.
    backward, share = compute.first_stage[divides_backward(plan)], 1.0 / plan.interleave
    num_segments = max(1.0, compute.num_segments // plan.interleave)
    window = backward * _ready(data.waits[0], num_segments)
    earliest = -math.inf
    if data.unshard.sent:  # gathers of the same phase go first
        earliest = data.unshard.sent - (compute.backward_seconds + extra.backward)
    own = 0.0 if has_rounds(plan) else data.reduce.own + slowed(slowdown, data.reduce.sent * share, window)
    if not data.reduce.sent:
        return Tail(own, own)
    late = max(each.sent * share - _ready(each, num_segments) * backward for each in data.waits)
    first = max(0.0, data.reduce.first - window, earliest + data.reduce.first)
    return Tail(own + first, own + max(late, earliest + data.reduce.sent))


def _ready(wait: Wait, num_segments: float) -> float:
    """The fraction of a backward that is left when a bucket is ready: whole segments."""
    return math.floor(wait.fraction_left * num_segments + ROUNDING) / num_segments


def update_seconds(plan: Plan, place: PlaceWork, reduced: Tail) -> float:
    """From the last backward to the end of the step: buckets are updated in turn, as their gradients come.

    New weights are gathered as they are updated; with local steps, changes are summed so, in some of the steps. Updates
    that stand in front of a forward let it begin while weights are gathered that it uses later.
    """
    compute, data, _ = place
    (update, first, last), gather = data.updates, data.gather
    updated = max(reduced.first + update, reduced.all + last)
    if plan.sync == "local":
        pushed = max(updated + data.push.last, reduced.first + first + data.push.sent)
        averaged = pushed - updated + data.push.own + data.pull_seconds
        return updated + averaged / plan.sync_interval
    if plan.update == "in_forward":  # in the next step, when all gradients are there
        window = compute.forward_seconds / plan.interleave * (1.0 - 1.0 / max(1, data.num_buckets))
        gathered = first + max(gather.first, gather.sent - window) if gather.sent else 0.0
        return reduced.all + max(update, gathered) + gather.own
    gathered = max(updated + gather.last, reduced.first + first + gather.sent) if gather.sent else updated
    return gathered + gather.own


# ---- estimates -----------------------------------------------------------------------------------------------------


ESTIMATE_ERROR = 0.12
edge_key = attrgetter(
    *("pp", "dp", "cp", "tp", "interleave", "edge", "edge_density", "ring", "ulysses"),
    *("sequence_parallel", "precision"),
)


class Estimator:
    """Estimates the plans of one search: `source`, `prices` and `topology` stay the same."""

    def __init__(self, source: FactsSource, prices: Prices, topology: Topology) -> None:
        self._source, self._prices, self._topology = source, prices, topology
        self.stages = StageTable(source, prices)
        self._buckets = BucketTable(source, prices, topology)
        self._slowdown, self._between = prices.slowdown(), prices.between_actions()
        self._waiting = prices.waiting()

    def estimate(self, plan: Plan, speeds: Sequence[float] = ()) -> Prediction:
        """What a step takes on average, and what a rank of the fullest place holds; no timeline, no bytes sent.

        speeds  by place: how fast its devices compute, relative to the prices; empty: as fast
        """
        return Prediction(plan, self.terms(plan, speeds), (self._fullest(plan),), {})

    def terms(self, plan: Plan, speeds: Sequence[float] = ()) -> StepTerms:
        """Of an estimate: they need no facts of activations, which take long to count."""
        samples = self._samples(plan)
        computes = self.stages.of(plan, samples, self._data_group(plan))
        if speeds:
            computes = tuple(each.at_speed(speed) for each, speed in zip(computes, speeds, strict=True))
        kinds = self._buckets.of(plan)
        places = [
            PlaceWork(compute, kinds.kinds[kind], extras(plan, compute, kinds.kinds[kind], self._slowdown))
            for compute, kind in zip(computes, kinds.of_place, strict=True)
        ]
        steps = _PlaceSteps(plan, places, self._run(plan, places, samples), self._slowdown, self._between)
        distinct = range(plan.pp) if speeds else kinds.first_places
        if self._waiting == 1.0:
            terms = steps.terms(max(distinct, key=steps.seconds))
        else:  # of shorter waits, the longest step need not be that of the longest span
            shortened = [shorten_waits(steps.terms(place), self._waiting) for place in distinct]
            terms = max(shortened, key=lambda each: each.total)
        return terms._replace(overhead=terms.overhead + self._prices.around_step())

    def _samples(self, plan: Plan) -> float:
        """Of a microbatch of the data rank that has most."""
        return -(-self._source.batch_size // plan.dp) / plan.microbatches

    def _data_group(self, plan: Plan) -> GroupShape:
        """The ranks of dp, for batch statistics."""
        if plan.batch_norm != "sync":
            return GroupShape(1)
        shares_memory = self._buckets.hosts(plan).shares_memory
        return shape_of(self._topology, plan.mesh.peers(0, "dp"), shares_memory=shares_memory)

    def _run(self, plan: Plan, places: Sequence[PlaceWork], samples: float) -> PipelineSeconds:
        """When each place begins its first forward and ends its last backward."""
        between = self._between * plan.interleave
        forwards = [each.compute.forward_seconds + each.extra.forward + between for each in places]
        inputs = [each.compute.input_seconds + between for each in places]
        weights = [
            compute.weight_seconds + extra.backward + extra.gradients + between * divides_backward(plan)
            for compute, _, extra in places
        ]
        if plan.pp == 1:
            pace = forwards[0] + inputs[0] + weights[0]
            return PipelineSeconds([0.0], [plan.microbatches * pace], pace)
        edges, tie = self._edge_seconds(plan, samples)
        run = FORMS[plan.schedule](PlaceTimes(forwards, inputs, weights, edges), plan.pipeline_spec)
        if tie:  # the last place waits for the weight, and the first one receives its gradient
            late = max(0.0, tie - run.starts[-1])
            run = run._replace(ends=[run.ends[0] + late + tie, *(end + late for end in run.ends[1:])])
        if divides_backward(plan) or has_rounds(plan):
            return run
        # What places sum themselves in their last backward delays the places in front of them.
        behind = [0.0, *itertools.accumulate(each.data.reduce.own for each in reversed(places[1:]))]
        return run._replace(ends=[end + late for end, late in zip(run.ends, reversed(behind), strict=True)])

    @remembered(lambda _, plan, samples: (edge_key(plan), samples))
    def _edge_seconds(self, plan: Plan, samples: float) -> tuple[tuple[float, ...], float]:
        """What a message to the next place takes, as the mean of its two directions; and that of a tied weight."""
        edges = EdgeMessages(plan, self._source.facts(plan), self._topology, self._prices)
        edges.add_ties(tuple(self._source.specs(plan)))
        there = [edges.seconds(Action(Verb.SEND_FORWARD, place, 0), samples) for place in range(plan.pp)]
        back = [edges.seconds(Action(Verb.SEND_BACKWARD, place + 1, 0), samples) for place in range(plan.pp)]
        return tuple((a + b) / 2 for a, b in zip(there, back, strict=True)), edges.tie_seconds

    def _fullest(self, plan: Plan) -> MemoryParts:
        """What a rank of the place that holds most holds, without a reserve."""
        samples, kinds = self._samples(plan), self._buckets.of(plan)
        data = [kinds.kinds[kind] for kind in kinds.of_place]
        places = self.stages.activations(plan, samples)
        flights = flights_of(plan.schedule, plan.pipeline_spec) if plan.pp > 1 else [Flight(1.0)]
        activations = [
            samples * (each.saved * own.saved_bytes + each.deferred * own.deferred_bytes)
            for each, own in zip(flights, places, strict=True)
        ]
        has_halves = divides_backward(plan)
        temporaries = [each.first_half_bytes if has_halves else each.temporary_bytes for each in places]
        totals = [
            own.resting.total + kept + more for own, kept, more in zip(data, activations, temporaries, strict=True)
        ]
        place = max(range(plan.pp), key=totals.__getitem__)
        received = self._source.facts(plan).boundary_bytes * samples if plan.pp > 1 else 0.0
        resting = data[place].resting
        return resting._replace(
            activations=activations[place],
            buffers=resting.buffers + received,  # the message that is sent
            temporaries=temporaries[place],
        )


class _PlaceSteps:
    """The steps of the places of one plan."""

    def __init__(
        self, plan: Plan, places: Sequence[PlaceWork], run: PipelineSeconds, slowdown: float, between: float
    ) -> None:
        self._plan, self._places, self._run = plan, places, run
        self._slowdown, self._between = slowdown, between

    @remembered()
    def _tail(self, place: int) -> Tail:
        return tail(self._plan, self._places[place], self._slowdown)

    def _reduced(self, place: int) -> float:
        """When a place has its gradients; with rounds of reductions, messages may take longer than computing."""
        (compute, own, _), run = self._places[place], self._run
        reduced = run.ends[place] + self._tail(place).all
        if has_rounds(self._plan):
            # From when the first bucket is ready in the first backward; the slowest place sets the pace of backwards.
            left = compute.backward_seconds * own.waits[0].fraction_left
            left += min(left, slowed(self._slowdown, own.reduce.sent, left + compute.forward_seconds))
            ready = run.ends[place] - (self._plan.microbatches - 1) * run.pace - left
            reduced = max(reduced, ready + self._plan.microbatches * own.reduce.sent)
        return reduced

    def seconds(self, place: int) -> float:
        """From the first forward of a place to the end of its step."""
        _, own, extra = self._places[place]
        first = own.gradients[0] - extra.gradients
        return self._run.ends[place] + first - self._run.starts[place] + sum(self._behind(place))

    def terms(self, place: int) -> StepTerms:
        """Where the seconds of a place go, from its first forward to the end of its step."""
        plan, m, run = self._plan, self._plan.microbatches, self._run
        compute, own, extra = self._places[place]
        computed = scale_terms(add_terms(compute.forward, compute.backward_input, compute.backward_weight), m)
        gradients = own.gradients[0] + (m - 1) * extra.gradients
        begin, end = run.starts[place], run.ends[place] + own.gradients[0] - extra.gradients
        waited, behind = self._behind(place)
        num_computes = m * (2 + divides_backward(plan)) * plan.interleave
        busy = m * (extra.forward + extra.backward) + gradients + sum(computed) + self._between * num_computes
        update = own.updates[0] + own.measured.own + own.pull_seconds / plan.sync_interval
        return computed._replace(
            compute=computed.compute + gradients,
            exposed=computed.exposed + m * (extra.forward + extra.backward) + behind - update,
            bubble=max(0.0, end - begin - busy) + waited,
            update=update,
            overhead=self._between * (num_computes + 1 + own.num_buckets + bool(own.measured.total)),
        )

    def _behind(self, place: int) -> tuple[float, float]:
        """Seconds behind the last backward of a place: those in which it waits for other places, and all others."""
        plan, work, end = self._plan, self._places[place], self._run.ends[place]
        measured = work.data.measured
        reduced = self._reduced(place)
        if not measured.total:
            late = reduced - end - self._tail(place).all
            return 0.0, late + update_seconds(plan, work, self._tail(place))
        # The norm is there when the slowest place has its gradients; then all begin their updates.
        waited = max(map(self._reduced, range(plan.pp))) - reduced
        return waited, reduced - end + measured.total + update_seconds(plan, work, Tail(0.0, 0.0))
