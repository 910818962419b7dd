"""Step prediction: the very program that would run, simulated on one rank of each place on the pipeline axis.

Law: all ranks of a place run the same program on as many samples, so one of them stands for all; the terms are those of
the place whose span is the longest, and add up to the step.
"""

from collections.abc import Sequence

from fourfold.plan.lowering import Blueprint
from fourfold.plan.predict.action_costs import Job, PlaceCosts, StepCosts, place_groups, pricer_of
from fourfold.plan.predict.edges import EdgeMessages
from fourfold.plan.predict.facts import FactsSource
from fourfold.plan.predict.memory import predict_memory
from fourfold.plan.predict.prediction import Prediction, StepTerms
from fourfold.plan.predict.prices import Prices
from fourfold.plan.predict.sent_bytes import sent_bytes
from fourfold.plan.predict.stage_seconds import add_terms, scale_terms, shorten_waits
from fourfold.plan.predict.steady_step import Simulated, simulate_steady
from fourfold.plan.predict.step_terms import first_start, step_terms
from fourfold.plan.predict.use_orders import predicted_record
from fourfold.plan.simulate import simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, Program


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
    costs = StepCosts(place.of(program[index]) for index, place in enumerate(places))
    timeline = simulate(program, costs.cost, overlap=costs.overlap, mesh=Mesh(pp=len(places)))
    ends = {place: max(timed.end for timed in times) for place, times in timeline.items()}
    starts = {place: first_start(times, costs.by_place[place].parts) for place, times in timeline.items()}

    def terms_of(place: int) -> StepTerms:
        parts = costs.by_place[place].parts
        return shorten_waits(step_terms(timeline[place], parts, begin=starts[place], end=ends[place]), waiting)

    longest = max(ends, key=lambda place: ends[place] - starts[place])
    # Of shorter waits, the longest step need not be that of the longest span.
    terms = terms_of(longest) if waiting == 1.0 else max(map(terms_of, ends), key=lambda each: each.total)
    return Simulated(terms, timeline)
