"""Choice: from estimated plans to simulated ones, and to the answer.

ratio   a simulation over its estimate; the least one of those known says how much too dear an estimate may be
equal   plans whose simulations are closer than the error of a prediction
simple  a plan with few fields that differ from their defaults; of equal ones, that with fewer axes
Law: the answer is the simplest plan that is equal to the fastest, and it is not slower than a baseline.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.planner.predict.estimate import ESTIMATE_ERROR
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.progress import Progress
from fourfold.planner.search.step_pricing import Pricing
from fourfold.words.errors import PlanError
from fourfold.words.mesh import AXES

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
    pricing: Pricing,
    *,
    limit_bytes: float,
    error: float,
    cutoff: float = math.inf,
    progress: Progress | None = None,
) -> Choice:
    """The answer among estimated plans.

    baselines  those that the answer must not be slower than; they are among the kept ones
    cutoff     the least estimate of a plan that has not been kept
    """
    progress = progress or Progress()
    progress.begin("simulating the best", MAX_SIMULATED + MAX_SIMPLER)
    simulations = _Simulations(pricing, limit_bytes, progress)
    for each in baselines:
        simulations.add(each)
    not_slower_than = min((each.seconds for each in simulations.fitting), default=math.inf)
    left = simulations.search_fastest(sorted(kept, key=_order))
    answer, fastest = None, simulations.fastest
    while fastest is not None:
        answer = simulations.simplest_within(min(fastest.seconds * (1 + error), not_slower_than), kept)
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

    def __init__(self, pricing: Pricing, limit_bytes: float, progress: Progress) -> None:
        self._pricing, self._limit, self._progress = pricing, limit_bytes, progress
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
