"""Step prediction: the very program that would run, simulated on one rank of each place on the pipeline axis.

unrolled  the steps of several batches in a row, with actions numbered through
steady    once every index has as many microbatches in flight as it ever has, all steps take as long
gap   a time in which the process computes nothing: it waits for a message, for a collective, or for other stages
tail  from the last action of the process to the end of the step
span  from a rank's first action to its last end: parts, gaps and tail
first use  of a bucket: in the first segment of its stage that has one of its parameters; in backward, in the last one
Law: all ranks of a place run the same program on as many samples, so one of them stands for all; the terms are those of
the place whose span is the longest, and add up to the step.
Law: the bytes of an axis are those of the collectives and messages that its program and its segments have.
Law: a step takes as long as the slowest index computes, or as the messages of a round trip leave to it.
Law: a bucket with parameters of many blocks, as norms and biases have, is gathered when the first of these is used.

Ranks do not wait for each other between steps: the step of each begins when its own one before has ended, so a step
takes the longest span. Qi et al. (2401.10241) count their bubbles in the same way.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.axes.data.rules.step_program import UseOrders
from fourfold.axes.data.rules.zero import layout_changes
from fourfold.axes.pipeline.rules.schedules import batches_in_flight, warm_up
from fourfold.axes.pipeline.rules.spec import PipelineSpec
from fourfold.plan.dependencies import Dependency
from fourfold.plan.lowering import Blueprint, DataGroup
from fourfold.plan.plan import Plan
from fourfold.plan.rank_program import lane_of
from fourfold.plan.simulate import TimedAction, Timeline, simulate
from fourfold.plan.step_programs import StepRecord
from fourfold.planner.predict.action_costs import Job, PlaceCosts, ProgramCosts, place_groups, pricer_of
from fourfold.planner.predict.edges import EdgeMessages, message_bytes
from fourfold.planner.predict.facts import Collective, FactsSource, SegmentFacts
from fourfold.planner.predict.memory import predict_memory
from fourfold.planner.predict.prediction import Prediction, StepTerms
from fourfold.planner.predict.prices import Prices
from fourfold.planner.predict.stage_seconds import ZERO, add_terms, scale_terms, segments_by_parameter, shorten_waits
from fourfold.words.layout import Change, collective_sent_bytes
from fourfold.words.mesh import AXES, Mesh
from fourfold.words.program import Action, Program, Verb
from fourfold.words.trace_events import GATHER_LANE, REDUCE_LANE

# ---- use orders ----------------------------------------------------------------------------------------------------

EVERYWHERE = range(sys.maxsize)


def predicted_record(blueprint: Blueprint, segments: Sequence[Sequence[SegmentFacts]]) -> StepRecord:
    """What the first step learns of the gathers of weights. `segments`: by stage."""
    groups = {
        group.stage.stage: group
        for group in blueprint.groups
        if layout_changes(group.resting_layouts).before_use != Change.NONE
    }
    if not groups:
        return StepRecord()
    places = [segments_by_parameter(own) for own in segments]
    return StepRecord(use_orders={place: _use_orders(group, places) for place, group in groups.items()})


def _use_orders(group: DataGroup, places: Sequence[Mapping[str, range]]) -> UseOrders:
    """Buckets are numbered in reverse order of definition. A parameter that is in no segment is used all the time."""
    firsts, lasts = [], []
    for bucket, stage in zip(group.buckets, group.stage.bucket_stages, strict=True):
        uses = [places[stage].get(slot.name, EVERYWHERE) for slot in bucket.slots]
        firsts.append(min(each.start for each in uses))
        lasts.append(max(each.stop for each in uses))
    forward = tuple(sorted(range(len(firsts)), key=lambda bucket: (firsts[bucket], -bucket)))
    backward = tuple(sorted(range(len(firsts)), key=lambda bucket: (-lasts[bucket], bucket)))
    return UseOrders(forward, backward, forward)


# ---- steady step ---------------------------------------------------------------------------------------------------

NUM_MEASURED = 2  # steps, of which the mean is taken
FORWARDS = (Verb.RECEIVE_FORWARD, Verb.FORWARD, Verb.SEND_FORWARD)
BACKWARDS = (Verb.RECEIVE_BACKWARD, Verb.BACKWARD)
BATCH_ENDS = (Verb.REDUCE, Verb.UPDATE)


class Simulated(NamedTuple):
    """The terms of the slowest place, and the timeline of one rank of each."""

    terms: StepTerms
    timeline: Mapping[int, tuple[TimedAction, ...]]


class Numbered(NamedTuple):
    """An action of the program, and the same with the number of its microbatch or bucket counted over all steps."""

    named: Action
    action: Action


def simulate_steady(blueprint: Blueprint, places: Sequence[PlaceCosts], program: Program) -> Simulated:
    """A step between others. `program`: of one rank of each place."""
    spec = blueprint.plan.pipeline_spec
    # The slowest index holds the others up only when they have run ahead as far as they can.
    num_steps = 2 * batches_in_flight(spec) + 2 + NUM_MEASURED
    steps = {  # by place
        place: [number_step(actions, spec, place, step) for step in range(num_steps)]
        for place, actions in program.items()
    }
    unrolled = {place: tuple(each.action for step in own for each in step) for place, own in steps.items()}
    costs = [ProgramCosts(place, unrolled[index]) for index, place in enumerate(places)]
    timeline = _timeline(unrolled, costs)
    by_place = []
    for place, own in steps.items():
        parts = costs[place].parts
        begin, end = (_end_of(own[index], parts, timeline[place]) for index in (-1 - NUM_MEASURED, -1))
        times = [timed for timed in timeline[place] if begin <= timed.start < end]
        by_place.append(step_terms(times, parts, begin=begin, end=end))
    slowest = max(by_place, key=lambda terms: terms.total - terms.bubble)
    return Simulated(scale_terms(slowest, 1 / NUM_MEASURED), _last_step(steps, timeline))


def _timeline(program: Program, costs: Sequence[ProgramCosts]) -> Timeline:
    """`program`, `costs`: by place."""

    def overlap(place: int, action: Action, needed: Dependency) -> float:
        return costs[place].overlaps.get((action, needed.action), 0.0)

    return simulate(
        program, lambda place, action: costs[place].seconds[action], overlap=overlap, mesh=Mesh(pp=len(costs))
    )


def number_step(actions: Sequence[Action], spec: PipelineSpec, place: int, step: int) -> list[Numbered]:
    """The actions of one step of a place. Backwards begin `warm_up` microbatches later, so the first steps lack some.

    Scalars are left out: they are summed while ranks compute.
    """
    numbered, first = [], step * spec.microbatches
    backward = first - warm_up(spec, place)  # of the next backward
    num_buckets = sum(action.verb == Verb.UPDATE for action in actions)
    for action in actions:
        if action.verb in FORWARDS:
            number = first + action.index
        elif action.verb in BACKWARDS:
            number = backward
            backward += action.verb == Verb.BACKWARD
        elif action.verb == Verb.SEND_BACKWARD:
            number = backward - 1
        elif action.verb in BATCH_ENDS:
            batch = (backward - 1) // spec.microbatches
            number = batch * num_buckets + action.index if batch >= 0 else -1
        else:
            continue
        if number >= 0:
            numbered.append(Numbered(action, action._replace(index=number)))
    return numbered


def _end_of(step: Sequence[Numbered], parts: Mapping[Action, StepTerms], times: Sequence[TimedAction]) -> float:
    """When the process ends a step."""
    own = {each.action for each in step if each.action in parts}
    return max(timed.end for timed in times if timed.action in own)


def _last_step(
    steps: Mapping[int, Sequence[Sequence[Numbered]]], timeline: Mapping[int, Sequence[TimedAction]]
) -> dict[int, tuple[TimedAction, ...]]:
    """The last step of each place, under the names of the program, from the first begin of one of them."""
    chosen = {}
    for place, own in steps.items():
        times = {timed.action: timed for timed in timeline[place]}
        chosen[place] = [(named, times[action]) for named, action in own[-1]]
    begin = min(timed.start for times in chosen.values() for _, timed in times)
    return {
        place: tuple(TimedAction(named, timed.start - begin, timed.end - begin) for named, timed in times)
        for place, times in chosen.items()
    }


# ---- sent bytes ----------------------------------------------------------------------------------------------------


def sent_bytes(job: Job) -> dict[str, float]:
    """By axis, on the place that sends most on it; local steps on average."""
    plan = job.blueprint.plan
    samples = float(sum(job.microbatch_sizes))
    by_stage = [_segment_bytes(plan, segments, samples) for segments in job.segments]
    sent: dict[str, float] = dict.fromkeys(AXES, 0.0)
    for axis in ("cp", "tp"):
        by_place = [sum(by_stage[stage][axis] for stage in range(p, plan.num_stages, plan.pp)) for p in range(plan.pp)]
        sent[axis] = max(by_place)
    if plan.mesh.dp * plan.mesh.cp > 1:
        sent["dp"] = job.blueprint.sent_bytes / plan.sync_interval
    if plan.pp > 1:
        each = message_bytes(plan, job.facts, 1.0)
        # A place in the middle sends forward and back; of two places, each sends in one direction only.
        crossings = plan.interleave * (each.both if plan.pp > 2 or plan.interleave > 1 else max(each))
        sent["pp"] = samples * crossings
    return sent


def _segment_bytes(plan: Plan, segments: Sequence[SegmentFacts], samples: float) -> dict[str, float]:
    """By axis inside of segments, what a rank sends for one stage."""
    collectives = [each for segment in segments for each in segment.collectives]
    sizes = {"tp": plan.tp, "cp": plan.cp}
    return {
        axis: sum(_sent(each, size, samples, plan.recompute) for each in collectives if each.axis == axis)
        for axis, size in sizes.items()
    }


def _sent(collective: Collective, size: int, samples: float, recompute: str) -> float:
    times = collective.forward + collective.backward + collective.repeats(recompute)
    return times * collective_sent_bytes(
        collective.change, whole_bytes=round(collective.whole_bytes * samples), size=size
    )


# ---- terms of a span ------------------------------------------------------------------------------------------------

RECEIPT_OF = {
    Verb.FORWARD: Verb.RECEIVE_FORWARD,
    Verb.BACKWARD: Verb.RECEIVE_BACKWARD,
    Verb.BACKWARD_INPUT: Verb.RECEIVE_BACKWARD,
}


def first_start(times: Sequence[TimedAction], parts: Mapping[Action, StepTerms]) -> float:
    """When the process begins to be busy, or could: what it waits for may be weights that are still gathered."""
    first = min((timed for timed in times if timed.action in parts), key=lambda timed: timed.start, default=None)
    if first is None:
        return 0.0
    action = first.action
    received = Action(RECEIPT_OF[action.verb], action.stage, action.index) if action.verb in RECEIPT_OF else None
    messages = [timed.end for timed in times if timed.action == received]
    gathers = [timed.start for timed in times if timed.action.verb == Verb.UNSHARD]
    return min([first.start, *(messages or gathers)])


def step_terms(
    times: Sequence[TimedAction], parts: Mapping[Action, StepTerms], *, begin: float, end: float
) -> StepTerms:
    """The terms of one rank's span, from its `begin` to its `end`. `parts`: of the actions of the process itself."""
    ends = {timed.action: timed.end for timed in times}
    has_gathers = any(lane_of(action) == GATHER_LANE for action in ends)
    collective_ends = sorted(timed.end for timed in times if _is_collective(timed.action))
    terms, clock = [ZERO], begin
    for action, start, stop in times:
        if action not in parts:
            continue
        if start > clock:
            terms.append(_gap(clock, start, _exposed_from(action, ends, collective_ends, start, has_gathers)))
        terms.append(parts[action])
        # What ranks end together lasts as long as that of the last one.
        late = max(0.0, stop - start - sum(parts[action]))
        terms.append(ZERO._replace(bubble=late))
        clock = stop
    last_collective = max((each for each in collective_ends), default=0.0)
    terms.append(_gap(clock, end, (clock, min(last_collective, end))))
    return add_terms(*terms)


def _is_collective(action: Action) -> bool:
    return lane_of(action) in (REDUCE_LANE, GATHER_LANE) or action.verb == Verb.PUSH


def _exposed_from(
    action: Action, ends: Mapping[Action, float], collective_ends: Sequence[float], start: float, has_gathers: bool
) -> tuple[float, float]:
    """The part of the gap in front of an action in which it waits for collectives of the data axis."""
    if action.verb in RECEIPT_OF:
        received = ends.get(Action(RECEIPT_OF[action.verb], action.stage, action.index), 0.0)
        return (received, start) if has_gathers else (start, start)
    return 0.0, max((each for each in collective_ends if each <= start), default=0.0)


def _gap(begin: float, end: float, exposed: tuple[float, float]) -> StepTerms:
    """A gap, divided: what is not exposed is a wait for other stages."""
    first, last = (min(max(each, begin), end) for each in exposed)
    waited = max(0.0, last - first)
    return ZERO._replace(exposed=waited, bubble=end - begin - waited)


# ---- step prediction -----------------------------------------------------------------------------------------------


def predict_step(
    blueprint: Blueprint,
    source: FactsSource,
    prices: Prices,
    *,
    stage_blocks: Sequence[range] | None = None,
    reserve_bytes: float = 0.0,
    speeds: Sequence[float] = (),
) -> Prediction:
    """What a step of the blueprint takes on average, and what its ranks hold.

    stage_blocks  by stage: its blocks, if they are not those that the plan has by `source`
    speeds        by place on the pipeline axis: how fast its devices compute, relative to the prices
    """
    plan = blueprint.plan
    facts = source.facts(plan)
    job = Job(blueprint, facts, stage_blocks or source.stage_blocks(plan), prices, source.batch_size, speeds)
    places = _places(job)
    programs, waiting = blueprint.programs(predicted_record(blueprint, job.segments)), prices.waiting()
    program = _one_of_each(blueprint, programs.step)
    if plan.is_asynchronous:
        synced = simulate_steady(blueprint, places, program)
        terms = shorten_waits(synced.terms, waiting)
    else:
        synced = _simulate(program, places, waiting)
        terms = synced.terms
    if plan.sync == "local":
        local = _simulate(_one_of_each(blueprint, programs.local_step), places, waiting)
        share = 1.0 / plan.sync_interval
        terms = add_terms(scale_terms(terms, share), scale_terms(local.terms, 1.0 - share))
    terms = terms._replace(overhead=terms.overhead + prices.around_step())
    memory = predict_memory(blueprint, source, stage_blocks=job.stage_blocks, reserve_bytes=reserve_bytes)
    return Prediction(plan, terms, memory, sent_bytes(job), synced.timeline)


def _places(job: Job) -> list[PlaceCosts]:
    """What the actions of each place cost."""
    blueprint = job.blueprint
    pricer = pricer_of(job)
    edges = EdgeMessages(blueprint.plan, job.facts, blueprint.topology, job.prices)
    edges.add_ties(blueprint.specs)
    return [PlaceCosts(job, group, pricer, edges) for group in place_groups(blueprint)]


def _one_of_each(blueprint: Blueprint, program: Program) -> dict[int, tuple[Action, ...]]:
    """The program of one rank of each place, by place."""
    return {place: program[group.ranks[0]] for place, group in enumerate(place_groups(blueprint))}


def _simulate(program: Program, places: Sequence[PlaceCosts], waiting: float) -> Simulated:
    """The timeline of a program, and the terms of the place with the longest step. `waiting`: `Prices.waiting`."""
    costs = [ProgramCosts(place, program[index]) for index, place in enumerate(places)]
    timeline = _timeline(program, costs)
    ends = {place: max(timed.end for timed in times) for place, times in timeline.items()}
    starts = {place: first_start(times, costs[place].parts) for place, times in timeline.items()}

    def terms_of(place: int) -> StepTerms:
        parts = costs[place].parts
        return shorten_waits(step_terms(timeline[place], parts, begin=starts[place], end=ends[place]), waiting)

    longest = max(ends, key=lambda place: ends[place] - starts[place])
    # Of shorter waits, the longest step need not be that of the longest span.
    terms = terms_of(longest) if waiting == 1.0 else max(map(terms_of, ends), key=lambda each: each.total)
    return Simulated(terms, timeline)
