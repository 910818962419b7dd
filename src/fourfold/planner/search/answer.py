"""Answer: from a question to a decision.

    baselines → search → single layers → simulation → choice → reasons

change  of one field, the mesh filled up with data ranks; of the memory of a device; of the number of devices
ratio   a simulation over its estimate; the least one of those known says how much too dear an estimate may be
equal   plans whose simulations are closer than the error of a prediction
simple  a plan with few fields that differ from their defaults; of equal ones, that with fewer axes
Law: the answer has what the ask pins, fits, and is not slower than any baseline that has and does both.
Law: every plan that a change leads to fits, and a refusal names its bytes by category.
Law: the answer is the simplest plan that is equal to the fastest, and it is not slower than a baseline.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fourfold.plan.ask import NONE, Ask
from fourfold.plan.decode import format_pair
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import Cluster
from fourfold.planner.predict.estimate import ESTIMATE_ERROR
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.prediction import MemoryParts, Prediction
from fourfold.planner.predict.prices import Prices
from fourfold.planner.search.baselines import fitting, price_baselines
from fourfold.planner.search.decision import Change, Decision, Progress, Refused
from fourfold.planner.search.layers import search_layers
from fourfold.planner.search.search import NO_DIMS, PREDICTION_ERROR, Found, Question, first_fitting, search
from fourfold.planner.search.space import CHOICES, Space, divisors, make_space
from fourfold.planner.search.step_pricing import StepPricing
from fourfold.words.errors import PlanError, Problem
from fourfold.words.mesh import AXES
from fourfold.words.units import format_bytes, write_bytes

# ---- choice --------------------------------------------------------------------------------------------------------

MIN_SIMULATED = 6  # plans, before the ratios are relied on
MAX_SIMULATED = 16  # in search of the fastest
MAX_SIMPLER = 8  # in search of the simplest of those that are equal to it
SAME = 1e-9  # of estimates: one of such plans is simulated, the simplest

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Plan)}


class Simplicity(NamedTuple):
    """Less is simpler. The text makes the order total, so that the answer does not depend on that of the search."""

    num_changed_fields: int
    num_axes: int
    text: str


def simplicity(plan: Plan) -> Simplicity:
    """How simple a plan is."""
    num_changed = sum(getattr(plan, name) != default for name, default in DEFAULTS.items())
    return Simplicity(num_changed, sum(getattr(plan, axis) > 1 for axis in AXES), plan.to_toml())


class Choice(NamedTuple):
    """The simulated plans that fit, the answer first, and the bound on what only estimated ones may gain."""

    ranked: tuple[Prediction, ...]
    bound: float


def choose(
    kept: Sequence[Prediction],
    baselines: Sequence[Prediction],
    question: Question,
    *,
    cutoff: float = math.inf,
) -> Choice:
    """The answer among estimated plans.

    baselines  those that the answer must not be slower than; they are among the kept ones
    cutoff     the least estimate of a plan that has not been kept
    """
    simulations = _Simulations(question)
    for each in baselines:
        simulations.add(each)
    not_slower_than = min((each.seconds for each in simulations.fitting), default=math.inf)
    left = simulations.search_fastest(sorted(kept, key=_order))
    answer, fastest = None, simulations.fastest
    while fastest is not None:
        answer = simulations.simplest_within(min(fastest.seconds * (1 + question.error), not_slower_than), kept)
        if simulations.fastest == fastest:
            break
        fastest = simulations.fastest  # a simpler plan has turned out to be faster still
    if answer is None or fastest is None:
        return Choice((), 0.0)
    others = sorted((each for each in simulations.fitting if each is not answer), key=_order)
    least = min([cutoff, *(each.seconds for each in left)]) * simulations.least_ratio
    return Choice((answer, *others), max(0.0, fastest.seconds / least - 1))


def _order(prediction: Prediction) -> tuple[float, Simplicity]:
    return prediction.seconds, simplicity(prediction.plan)


class _Simulations:
    """The plans that have been simulated, and how their estimates compare."""

    def __init__(self, question: Question) -> None:
        self._pricing, self._limit = question.pricing, question.limit_bytes
        self._progress = question.progress or Progress()
        self._progress.begin("simulating the best", MAX_SIMULATED + MAX_SIMPLER)
        self._by_plan: dict[Plan, Prediction | None] = {}
        self._estimates: list[float] = []
        self.least_ratio = 1.0

    @property
    def fitting(self) -> list[Prediction]:
        return [each for each in self._by_plan.values() if each is not None]

    @property
    def fastest(self) -> Prediction | None:
        return min(self.fitting, key=_order, default=None)

    def add(self, estimated: Prediction) -> Prediction | None:
        """The simulation of an estimated plan; None: it does not fit, or cannot be carried out after all."""
        plan = estimated.plan
        if plan not in self._by_plan:
            self._by_plan[plan] = found = self._simulate(plan)
            self._progress.done = min(self._progress.done + 1, self._progress.total)
            self._estimates.append(estimated.seconds)
            if found is not None:
                self.least_ratio = min(self.least_ratio, found.seconds / estimated.seconds)
        return self._by_plan[plan]

    def _simulate(self, plan: Plan) -> Prediction | None:
        try:
            found = self._pricing.simulate(plan)
        except PlanError:
            # Only lowering sees every rank: a plan that it refuses is no candidate.
            return None
        return found if found.memory.total <= self._limit else None

    def search_fastest(self, kept: Sequence[Prediction]) -> list[Prediction]:
        """Simulate the fastest by estimate until none that is left can be faster. Returns those that are left."""
        left = []
        for each in kept:
            if each.plan in self._by_plan:
                continue
            is_told_apart = not any(math.isclose(each.seconds, other, rel_tol=SAME) for other in self._estimates)
            if is_told_apart and not self._is_enough(each):
                self.add(each)
            else:
                left.append(each)
        return left

    def _is_enough(self, following: Prediction) -> bool:
        num, fastest = len(self._by_plan), self.fastest
        if fastest is None or num < MIN_SIMULATED:
            return False
        ratio = min(self.least_ratio, 1 / (1 + ESTIMATE_ERROR))
        return num >= MAX_SIMULATED or following.seconds * ratio > fastest.seconds

    def simplest_within(self, limit: float, kept: Sequence[Prediction]) -> Prediction:
        """The simplest plan whose simulation is within the limit: the fastest one's is."""
        num_left = MAX_SIMPLER
        for each in sorted([*kept, *self.fitting], key=lambda each: simplicity(each.plan)):
            if each.plan not in self._by_plan:
                if num_left == 0 or each.seconds * self.least_ratio > limit:
                    continue
                num_left -= 1
            found = self.add(each)
            if found is not None and found.seconds <= limit:
                return found
        raise AssertionError("no plan is as fast as the fastest")


# ---- refusals ------------------------------------------------------------------------------------------------------

_T = TypeVar("_T")
MAX_REFUSED = 5  # plans that are explained
DEVICE_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MEMORY_DIGITS = 7  # binary ones, to which the memory that would do is rounded up: less than 2 %


def explain_refused(too_large: Sequence[Prediction], question: Question, *, best: float) -> tuple[Refused, ...]:
    """The fastest plans that do not fit, one of each mesh, if they would be faster than the answer."""
    by_mesh: dict[object, Prediction] = {}
    for each in sorted(too_large, key=lambda each: each.seconds):
        if each.seconds < best:
            by_mesh.setdefault(each.plan.mesh, each)
    fastest = list(by_mesh.values())[:MAX_REFUSED]
    return tuple(explain(Refused(each.plan, question.limit_bytes, (), each), question) for each in fastest)


def explain(refused: Refused, question: Question) -> Refused:
    """The same refusal with the nearest changes; without any, if memory is not what is wrong."""
    if refused.prediction is None or not refused.excess_bytes:
        return refused
    changes = [
        _field_change(refused, question),
        memory_change(refused.prediction),
        _devices_change(refused, question),
    ]
    return dataclasses.replace(refused, changes=tuple(change for change in changes if change is not None))


def memory_problem(memory: MemoryParts, limit_bytes: float, attempt: str = "") -> Problem:
    """What a rank would hold, by category, the largest first, against what it may."""
    parts = sorted(zip(memory._fields, memory, strict=True), key=lambda part: -part[1])
    listing = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts if value)
    got = f"{format_bytes(memory.total)} of a rank: {listing}"
    return Problem(got, f"at most {format_bytes(limit_bytes)}", attempt)


def memory_change(prediction: Prediction) -> Change:
    """The memory of a device with which a plan would fit."""
    needed = math.ceil(prediction.memory.total)
    unit = 2 ** max(0, needed.bit_length() - MEMORY_DIGITS)
    return Change("memory", -(-needed // unit) * unit)


def _field_change(refused: Refused, question: Question) -> Change | None:
    """Of the changes of one open field with which the plan fits, the one that leaves it fastest."""
    timed = [
        (terms.total, name, value, plan)
        for name, value, plan in _neighbours(refused.plan, question.ask, question.space)
        if (terms := _priced(question.pricing.terms, plan)) is not None
    ]
    # What a rank holds is long to count: the fastest first, until one fits.
    for _, name, value, plan in sorted(timed, key=lambda each: each[0]):
        found = _priced(question.pricing.estimate, plan)
        if found is not None and found.memory.total <= refused.limit_bytes:
            return Change(name, value, found)
    return None


def _neighbours(plan: Plan, ask: Ask, space: Space) -> Iterator[tuple[str, Any, Plan]]:
    """The plans that differ in one open field, and in the data ranks that are left for it."""
    fields = dataclasses.asdict(plan)
    for name, choices in CHOICES.items():
        if name == "dp" or not ask.is_open(name):
            continue
        for value in choices(space, fields):
            changed = {**fields, name: value}
            inner = math.prod(changed[axis] for axis in AXES if axis != "dp")
            if value == fields[name] or space.num_devices % inner:
                continue
            try:
                changed_plan = Plan.from_dict({**changed, "dp": space.num_devices // inner})
            except PlanError:
                continue  # such as ulysses that no longer divides cp: more than one field would have to change
            is_asked = ask.pinned.get("dp", changed_plan.dp) == changed_plan.dp
            if is_asked and not space.problems(changed_plan):
                yield name, value, changed_plan


def _devices_change(refused: Refused, question: Question) -> Change | None:
    """The fewest devices with which the plan fits, if more data ranks share what it splits among them."""
    if not refused.plan.zero:
        return None
    for factor, larger in _larger(question):
        found = _priced(larger.pricing.estimate, dataclasses.replace(refused.plan, dp=refused.plan.dp * factor))
        if found is not None and found.memory.total <= refused.limit_bytes:
            return Change("devices", larger.space.num_devices, found)
    return None


def _larger(question: Question) -> Iterator[tuple[int, Question]]:
    """The question on more devices, as many times as many as the machine can have."""
    for factor in DEVICE_FACTORS:
        space = question.space._replace(num_devices=question.space.num_devices * factor)
        with contextlib.suppress(PlanError):
            yield factor, question.within(space=space, pricing=question.pricing.on_devices(space.num_devices))


def _priced(price: Callable[[Plan], _T], plan: Plan) -> _T | None:
    """None: the model cannot be laid out so."""
    try:
        return price(plan)
    except PlanError:
        return None


# ---- nothing fits ----------------------------------------------------------------------------------


def nothing_fits(too_large: Sequence[Prediction], question: Question) -> list[Problem]:
    """The plan that holds least, and the least memory, devices or field with which something would fit."""
    leanest = min(too_large, key=lambda each: each.memory.total)
    changes = [memory_change(leanest)]
    enough = (larger for _, larger in _larger(question) if first_fitting(larger) is not None)
    if (larger := next(enough, None)) is not None:
        changes.append(Change("devices", larger.space.num_devices))
    changes += _unpinned(question)
    problem = memory_problem(leanest.memory, question.limit_bytes, ", or ".join(map(change_text, changes)))
    plan = ", ".join(leanest.plan.to_toml().splitlines()[1:])
    return [problem._replace(got=f"no plan fits; the one that holds least ({plan or 'one device'}): {problem.got}")]


def _unpinned(question: Question) -> Iterator[Change]:
    """The pinned fields, each of which alone stands in the way: with another value something fits."""
    ask = question.ask
    for name in ask.pinned:
        if name in CHOICES:
            freed = Ask(**{**dict.fromkeys(ask.requested, "auto"), **ask.pinned, name: "auto"})
            plan = first_fitting(question.within(ask=freed))
            if plan is not None:
                yield Change(name, getattr(plan, name))


def change_text(change: Change) -> str:
    """A change as a user writes it in an ask."""
    if change.field == "memory" and isinstance(change.value, int):
        return f"memory = {write_bytes(change.value)}"
    return format_pair(change.field, NONE if change.value is None else change.value)


# ---- the time-memory front -----------------------------------------------------------------------------------------


def time_memory_front(estimated: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """The front, fastest first; of plans that are equal in both, the simplest."""
    front: list[Prediction] = []
    ordered = sorted(estimated, key=lambda each: (each.seconds, each.memory.total))
    for each in ordered:
        if not front or each.memory.total < front[-1].memory.total:
            front.append(each)
        elif (each.seconds, each.memory.total) == (front[-1].seconds, front[-1].memory.total):
            front[-1] = min(front[-1], each, key=lambda each: simplicity(each.plan))
    return tuple(front)


# ---- answer --------------------------------------------------------------------------------------------------------


def decide(
    ask: Ask,
    source: FactsSource,
    prices: Prices,
    cluster: Cluster,
    *,
    dims: Mapping[str, bool] = NO_DIMS,
    error: float | None = None,
    progress: Progress | None = None,
    deadline: float = math.inf,
) -> Decision:
    """The best plan for a task, the others that come close, and why.

    dims   that the task's tensor rules name, and whether they are on the tensor axis without a plan's `dims`:
           `marked_dims` of `axes/tensor/rules/dims.py`
    deadline  of `time.monotonic`: the search ends with what it has by then
    error  of a prediction: plans that are closer count as equal, and the simplest is the answer; None: the cluster's

    Raises PlanError, with all problems, if no plan is legal, or with the least that would fit, if none fits.
    """
    if error is None:
        error = cluster.prediction_error or PREDICTION_ERROR
    question = _question(ask, source, prices, cluster)
    decision = decide_among(question._replace(dims=dims, error=error, deadline=deadline, progress=progress))
    return dataclasses.replace(
        decision,
        host_order=question.pricing.host_order(decision.answer.plan),
        is_error_known=cluster.prediction_error > 0,
    )


def best_baseline_on(
    num_devices: int, ask: Ask, source: FactsSource, prices: Prices, cluster: Cluster
) -> Prediction | None:
    """The fastest baseline on so many devices; None: none fits and has what the ask pins, or there are not as many."""
    try:
        question = _question(ask.with_changes(devices=num_devices), source, prices, cluster)
        best = min(fitting(price_baselines(question)), key=lambda each: each.seconds, default=None)
        return None if best is None else question.pricing.simulate(best.plan)
    except PlanError:  # axes that are pinned make more devices
        return None


def _question(ask: Ask, source: FactsSource, prices: Prices, cluster: Cluster) -> Question:
    if ask.devices is not None:
        cluster = cluster.resized(ask.devices)
    ask = ask.with_changes(devices=cluster.num_devices)
    alone = Plan.from_dict({name: value for name, value in ask.pinned.items() if name == "precision"})
    space = make_space(
        source.facts(alone),
        num_devices=cluster.num_devices,
        devices_per_host=cluster.devices_per_host,
        batch_size=source.batch_size,
        clip=source.update_spec.clip,
        traits=source.traits,
    )
    limit_bytes = float(ask.memory_bytes or cluster.memory_bytes)
    return Question(ask, space, StepPricing(source, prices, cluster), limit_bytes)


def decide_among(question: Question) -> Decision:
    """The answer among all plans of the space. Raises PlanError if none is legal, or none fits."""
    pricing = question.pricing
    baselines = price_baselines(question)
    priced = list(fitting(baselines))
    found = _search(question, priced)
    if not found.kept and not priced:
        raise PlanError(_why_nothing(found, question), where="the ask")
    kept = _with_single_layers(_distinct([*found.kept, *priced]), question)
    best = min(each.seconds for each in kept)
    choice = choose(kept, priced, question, cutoff=best * _margin(question))
    if not choice.ranked:
        problems = [problem for each in kept for problem in pricing.problems(each.plan)]
        raise PlanError(problems or Problem("no plan whose program fits"), where="the ask")
    if question.progress is not None:
        question.progress.begin("saying why")
    simulated = {each.plan: each for each in choice.ranked}
    return Decision(
        choice.ranked,
        {name: _final(each, simulated, question) for name, each in baselines.items()},
        explain_refused(found.too_large, question, best=best),
        time_memory_front([*found.front, *kept]),
        question.error,
        choice.bound,
        found.num_estimated,
        num_unseen=found.num_unseen,
    )


def _search(question: Question, priced: list[Prediction]) -> Found:
    """The search within hosts, and beyond them if nothing fits."""
    margin = _margin(question)
    found = search(question, margin=margin, best=min((each.seconds for each in priced), default=math.inf))
    if found.kept or priced or not question.ask.is_open("tp"):
        return found
    across_hosts = question.space._replace(devices_per_host=None)
    beyond = search(question._replace(space=across_hosts, deadline=math.inf), margin=margin)
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
    return _distinct([*kept, *search_layers(starts, question)])


def _distinct(predictions: Iterable[Prediction]) -> list[Prediction]:
    """One of each plan."""
    return list({each.plan: each for each in predictions}.values())


def _final(
    each: Prediction | Refused, simulated: Mapping[Plan, Prediction], question: Question
) -> Prediction | Refused:
    """A baseline as simulated; a refused one with the nearest changes."""
    if isinstance(each, Refused):
        return explain(each, question)
    if each.plan in simulated:
        return simulated[each.plan]
    refused = Refused(each.plan, question.limit_bytes, tuple(question.pricing.problems(each.plan)), each)
    return dataclasses.replace(refused, prediction=None if refused.problems else each)


def _why_nothing(found: Found, question: Question) -> list[Problem]:
    ask, space = question.ask, question.space
    if found.too_large:
        return nothing_fits(found.too_large, question)
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
