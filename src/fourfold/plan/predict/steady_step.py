"""Steady step: a step of an asynchronous schedule, in which no index waits for the end of a batch.

unrolled  the steps of several batches in a row, with actions numbered through
steady    once every index has as many microbatches in flight as it ever has, all steps take as long
Law: a step takes as long as the slowest index computes, or as the messages of a round trip leave to it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.lowering import Blueprint
from fourfold.plan.pipeline.asynchronous import batches_in_flight, warm_up
from fourfold.plan.pipeline.spec import PipelineSpec
from fourfold.plan.predict.action_costs import PlaceCosts, StepCosts
from fourfold.plan.predict.prediction import StepTerms
from fourfold.plan.predict.stage_seconds import scale_terms
from fourfold.plan.predict.step_terms import step_terms
from fourfold.plan.simulate import TimedAction, simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, Program, Verb

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
    costs = StepCosts(place.of(unrolled[index]) for index, place in enumerate(places))
    timeline = simulate(unrolled, costs.cost, overlap=costs.overlap, mesh=Mesh(pp=spec.pp))
    by_place = []
    for place, own in steps.items():
        parts = costs.by_place[place].parts
        begin, end = (_end_of(own[index], parts, timeline[place]) for index in (-1 - NUM_MEASURED, -1))
        times = [timed for timed in timeline[place] if begin <= timed.start < end]
        by_place.append(step_terms(times, parts, begin=begin, end=end))
    slowest = max(by_place, key=lambda terms: terms.total - terms.bubble)
    return Simulated(scale_terms(slowest, 1 / NUM_MEASURED), _last_step(steps, timeline))


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
