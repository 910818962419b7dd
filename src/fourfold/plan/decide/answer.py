"""Answer: from a question to a decision.

    baselines → search → single layers → simulation → choice → reasons

Law: the answer has what the ask pins, fits, and is not slower than any baseline that has and does both.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.decide.ask import Ask
from fourfold.plan.decide.baselines import fitting, price_baselines
from fourfold.plan.decide.choice import choose
from fourfold.plan.decide.decision import Decision, Refused
from fourfold.plan.decide.front import time_memory_front
from fourfold.plan.decide.layers import NO_DIMS, Chain, search_layers
from fourfold.plan.decide.pricing import Pricing
from fourfold.plan.decide.progress import Progress
from fourfold.plan.decide.refusals import explain, explain_refused, nothing_fits
from fourfold.plan.decide.search import Found, search
from fourfold.plan.decide.space import Space, divisors
from fourfold.plan.plan import Plan
from fourfold.plan.predict.estimate import ESTIMATE_ERROR
from fourfold.plan.predict.prediction import Prediction
from fourfold.words.errors import PlanError, Problem
from fourfold.words.mesh import AXES

PREDICTION_ERROR = 0.05  # of a step: what `bench.predict` aims at in the mean


class Question(NamedTuple):
    """What `decide_among` needs.

    limit_bytes  what a rank may hold
    dims         that the task's tensor rules name, and whether they are on the tensor axis without a plan's `dims`
    error        of a prediction
    deadline     of `time.monotonic`: the search ends with what it has by then
    """

    ask: Ask
    space: Space
    pricing: Pricing
    limit_bytes: float
    dims: Mapping[str, bool] = NO_DIMS
    error: float = PREDICTION_ERROR
    deadline: float = math.inf


def decide_among(question: Question, progress: Progress | None = None) -> Decision:
    """The answer among all plans of the space. Raises PlanError if none is legal, or none fits."""
    ask, space, pricing, limit = question[:4]
    progress = progress or Progress()
    baselines = price_baselines(ask, space, pricing, limit_bytes=limit, progress=progress)
    priced = list(fitting(baselines))
    found = _search(question, priced, progress)
    if not found.kept and not priced:
        raise PlanError(_why_nothing(found, question), where="the ask")
    kept = _with_single_layers(_distinct([*found.kept, *priced]), question)
    cutoff = min(each.seconds for each in kept) * _margin(question)
    choice = choose(kept, priced, pricing, limit_bytes=limit, error=question.error, cutoff=cutoff, progress=progress)
    if not choice.ranked:
        problems = [problem for each in kept for problem in pricing.problems(each.plan)]
        raise PlanError(problems or Problem("no plan whose program fits"), where="the ask")
    progress.begin("saying why")
    simulated = {each.plan: each for each in choice.ranked}
    refused = explain_refused(
        found.too_large, ask, space, pricing, limit_bytes=limit, best=min(each.seconds for each in kept)
    )
    return Decision(
        choice.ranked,
        {name: _final(each, simulated, question) for name, each in baselines.items()},
        refused,
        time_memory_front([*found.front, *kept]),
        question.error,
        choice.bound,
        found.num_estimated,
        num_unseen=found.num_unseen,
    )


def _search(question: Question, priced: list[Prediction], progress: Progress) -> Found:
    """The search within hosts, and beyond them if nothing fits."""
    ask, space, pricing, limit = question[:4]
    best = min((each.seconds for each in priced), default=float("inf"))
    margin = _margin(question)
    found = search(
        ask, space, pricing, limit_bytes=limit, margin=margin, best=best, progress=progress, deadline=question.deadline
    )
    if found.kept or priced or not ask.is_open("tp"):
        return found
    across_hosts = space._replace(devices_per_host=None)
    beyond = search(ask, across_hosts, pricing, limit_bytes=limit, margin=margin, progress=progress)
    return beyond if beyond.kept else found


def _margin(question: Question) -> float:
    """Of estimates: the fastest plan is within the error of an estimate, and those equal to it within both."""
    return (1 + question.error) * (1 + ESTIMATE_ERROR)


def _with_single_layers(kept: list[Prediction], question: Question) -> list[Prediction]:
    """The plans that are kept, and those that moves of single layers make of them, where layers differ."""
    if question.space.has_equal_blocks and not question.dims:
        return kept
    best = sorted(kept, key=lambda each: each.seconds)
    by_mesh = list({each.plan.mesh: each for each in reversed(best)}.values())
    starts = sorted(by_mesh, key=lambda each: each.seconds)[:3]
    chain = Chain(question.ask, question.space, question.pricing, question.limit_bytes, question.dims)
    return _distinct([*kept, *search_layers(starts, chain)])


def _distinct(predictions: Iterable[Prediction]) -> list[Prediction]:
    """One of each plan."""
    return list({each.plan: each for each in predictions}.values())


def _final(
    each: Prediction | Refused, simulated: Mapping[Plan, Prediction], question: Question
) -> Prediction | Refused:
    """A baseline as simulated; a refused one with the nearest changes."""
    if isinstance(each, Refused):
        return explain(each, question.ask, question.space, question.pricing)
    if each.plan in simulated:
        return simulated[each.plan]
    refused = Refused(each.plan, question.limit_bytes, tuple(question.pricing.problems(each.plan)), each)
    return dataclasses.replace(refused, prediction=None if refused.problems else each)


def _why_nothing(found: Found, question: Question) -> list[Problem]:
    ask, space, pricing, limit = question[:4]
    if found.too_large:
        return nothing_fits(found.too_large, ask, space, pricing, limit_bytes=limit)
    if problems := [*_problems_of_plain(ask, space), *found.problems]:
        by_remedy = {each.attempt or each.got: each for each in reversed(problems)}  # the first of each
        return [each for each in problems if by_remedy.get(each.attempt or each.got) is each]
    got = f"{space.num_devices} devices, {space.batch_size} samples in a step, {space.num_blocks} blocks"
    need = "a mesh: data ranks that divide the samples, and at most as many places of the pipeline as blocks"
    fitting = max(size for size in divisors(space.batch_size) if size <= space.num_devices)
    return [Problem(got, need, f"devices = {fitting}, or fewer pinned axes")]


def _problems_of_plain(ask: Ask, space: Space) -> Sequence[Problem]:
    """Why what is pinned cannot be carried out with all other devices as data ranks: what one tries first."""
    inner = math.prod(size for axis in AXES if axis != "dp" and isinstance(size := ask.pinned.get(axis), int))
    try:
        return space.problems(Plan.from_dict({"dp": space.num_devices // inner, **ask.pinned}))
    except PlanError as error:
        return error.problems
