"""Search: all plans of an ask, without those that cannot be the answer.

best     the fewest estimated seconds of a plan that fits
margin   plans within this factor of the best are kept: one of them may be the answer
lean     the variant of a group that holds least: 1F1B, everything split, gradients that are freed early
pruned   a group whose floor, or whose lean variant, says that none of its plans is within the margin and fits
Law: the kept plans are those of a full enumeration with even stages, and some with better ones.

Three facts about estimates make it exact. The schedule changes waiting and activations; zero, shard and update change
the rest of the memory, what is exposed, and the update; of one mesh and `recompute`, a larger microbatch holds no less.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from fourfold.plan.decide.ask import Ask
from fourfold.plan.decide.pricing import Pricing
from fourfold.plan.decide.progress import Progress
from fourfold.plan.decide.space import GROUP_FIELDS, VARIANT_FIELDS, Fields, Space, choices, expand, groups
from fourfold.plan.plan import Plan
from fourfold.plan.predict.prediction import Prediction
from fourfold.words.errors import PlanError, Problem

MESH_FIELDS = tuple(name for name in GROUP_FIELDS if name not in ("microbatches", "recompute"))
CUT_FIELDS = ("precision", "tp", "sp", "ulysses", "ring", "residual")
SCHEDULE_FIELDS = ("schedule", "interleave", "max_in_flight")
SHARD_FIELDS = ("zero", "shard")
FRONT_RANGE = 2.0  # plans slower than this factor of the best are not worth the memory that they save
MAX_FRONT_GROUPS = 2000
ROUNDING = 1 + 1e-9  # of sums in another order


@dataclass
class Found:
    """What a search has found.

    kept       legal plans that fit, within the margin of the best
    too_large  plans that do not fit
    front      estimates of plans that fit, of all speeds: those on the time-memory front are among them
    problems   of plans that cannot be carried out
    """

    kept: list[Prediction] = field(default_factory=list)
    too_large: list[Prediction] = field(default_factory=list)
    front: list[Prediction] = field(default_factory=list)
    problems: dict[Problem, None] = field(default_factory=dict)
    num_estimated: int = 0

    @property
    def best(self) -> float:
        return min((prediction.seconds for prediction in self.kept), default=math.inf)


class _Group(NamedTuple):
    """A group in the queue. `plan`: one of its plans."""

    floor: float
    fields: Fields
    plan: Plan


class _Mesh:
    """The groups of a mesh of which some plan can be carried out.

    fits  whether some plan of them fits: found when it is asked for, because it takes the facts of activations
    """

    def __init__(self, groups: Sequence[_Group], has_lean: Callable[[_Group], bool]) -> None:
        self.groups, self._has_lean = groups, has_lean

    @cached_property
    def fits(self) -> bool:
        return any(map(self._has_lean, _smallest(self.groups)))


def search(
    ask: Ask,
    space: Space,
    pricing: Pricing,
    *,
    limit_bytes: float,
    margin: float,
    best: float = math.inf,
    progress: Progress | None = None,
) -> Found:
    """The plans of an ask that fit and are within the margin of the best.

    best  the seconds of a plan that is known already; infinite: none
    """
    searcher = _Searcher(ask, space, pricing, limit_bytes, margin, best, progress)
    searcher.run()
    found = searcher.found
    limit = min(found.best, best) * margin
    found.kept = [each for each in found.kept if each.seconds <= limit]
    return found


def first_fitting(ask: Ask, space: Space, pricing: Pricing, limit_bytes: float) -> Plan | None:
    """Some plan of an ask that fits; None: there is none."""
    searcher = _Searcher(ask, space, pricing, limit_bytes, 1.0, math.inf)
    return next((searcher.found.kept[0].plan for mesh in searcher.meshes() if mesh.fits and searcher.found.kept), None)


class _Searcher:
    """One pass over the groups, most promising first."""

    def __init__(
        self,
        ask: Ask,
        space: Space,
        pricing: Pricing,
        limit_bytes: float,
        margin: float,
        best: float,
        progress: Progress | None = None,
    ) -> None:
        self._ask, self._space, self._pricing = ask, space, pricing
        self._progress = progress or Progress()
        self._limit, self._margin, self._best = limit_bytes, margin, best
        self.found = Found()
        self._estimates: dict[tuple[tuple[str, Any], ...], Prediction | None] = {}
        # By mesh and recompute: the most microbatches, so the smallest ones, with which the lean variant does not fit.
        self._too_large: dict[tuple[Any, ...], int] = {}

    def run(self) -> None:
        self._progress.begin("counting what ranks compute")
        queue = [(group, mesh) for mesh in self.meshes() for group in mesh.groups]
        self._progress.begin("searching", len(queue))
        explored, num_left = set[tuple[Any, ...]](), MAX_FRONT_GROUPS
        for group, mesh in sorted(queue, key=lambda pair: pair[0].floor):
            self._progress.done += 1
            cut = tuple(group.fields[name] for name in CUT_FIELDS)
            # Samples cut in yet another way save little memory, and what their activations take is long to count.
            is_for_front = num_left and (group.plan.sp == 1 or cut in explored)
            if self._may_be_kept(group.floor):
                if mesh.fits:
                    explored.add(cut)
                    self._explore(group)
            elif is_for_front and group.floor <= self._best * FRONT_RANGE and mesh.fits:
                num_left -= 1
                self._has_lean(group)

    def meshes(self) -> Iterator[_Mesh]:
        for _, members in itertools.groupby(groups(self._ask, self._space), key=_mesh_of):
            yield _Mesh([group for fields in members if (group := self._group(fields)) is not None], self._has_lean)

    def _group(self, fields: Fields) -> _Group | None:
        """The group of these fields; None: no plan of it can be carried out."""
        for variant in expand(VARIANT_FIELDS, fields, self._ask, self._space):
            plan = self._candidate(variant)
            if plan is not None:
                try:
                    return _Group(self._pricing.floor(plan), fields, plan)
                except PlanError as error:
                    self._note(error.problems)
                    return None
        return None

    def _candidate(self, fields: Fields) -> Plan | None:
        """The plan of these fields; None: they do not go together, or not with the batch or the model."""
        try:
            plan = Plan.from_dict(fields)
            problems = self._space.problems(plan)
        except PlanError as error:
            self._note(error.problems)
            return None
        self._note(problems)
        return None if problems else plan

    def _has_lean(self, group: _Group) -> bool:
        """Whether a group has a lean variant that fits. Its estimate is a point of the time-memory front."""
        key = (*_mesh_of(group.fields), group.plan.recompute)
        if group.plan.microbatches <= self._too_large.get(key, 0):
            return False
        fields = {**group.fields, **{name: getattr(group.plan, name) for name in SCHEDULE_FIELDS}}
        for shards in reversed(list(expand(SHARD_FIELDS, fields, self._ask, self._space))):
            if shards["shard"] is not None and "shard" not in self._ask.pinned:
                continue
            for update in choices("update", shards, self._ask, self._space)[:2]:
                found = self._estimate({**shards, "update": update})
                if found is not None and found.memory.total <= self._limit:
                    return True
        self._too_large[key] = group.plan.microbatches
        return False

    def _explore(self, group: _Group) -> None:
        """Estimate the variants of a group that may be kept."""
        if not self._has_lean(group):
            return
        for schedule in expand(SCHEDULE_FIELDS, group.fields, self._ask, self._space):
            shards = list(expand(SHARD_FIELDS, schedule, self._ask, self._space))
            first = next((found for each in shards if (found := self._first_update(each)) is not None), None)
            if first is None or not self._may_be_kept(self._least_seconds(first)):
                continue
            even = [found for each in shards for found in self._explore_updates(each)]
            for stages in self._divisions(even):
                for found in even:
                    if self._may_be_kept(found.seconds - _span(found) + self._least_span(found)):
                        self._estimate({**schedule, **_of_variant(found.plan), "stages": stages})

    def _divisions(self, even: Sequence[Prediction]) -> list[str]:
        """Other divisions into stages, if one may bring a plan within the margin, or make it fit."""
        may_gain = any(self._may_be_kept(each.seconds - _span(each) + self._least_span(each)) for each in even)
        if not may_gain or even[0].plan.num_stages == 1 or not self._ask.is_open("stages"):
            return []
        fitting = [each for each in even if each.memory.total <= self._limit]
        plans = dict.fromkeys(each.plan for each in (*even[:1], *fitting[:1]))
        return list(dict.fromkeys(text for plan in plans for text in self._pricing.divisions(plan, self._limit)))

    def _first_update(self, fields: Fields) -> Prediction | None:
        updates = choices("update", fields, self._ask, self._space)
        return self._estimate({**fields, "update": updates[0]})

    def _explore_updates(self, fields: Fields) -> Iterator[Prediction]:
        """The update modes of a plan; of a plan that is too slow even without updates, the first one only."""
        for update in choices("update", fields, self._ask, self._space):
            found = self._estimate({**fields, "update": update})
            if found is not None:
                yield found
                if not self._may_be_kept(self._least_seconds(found)):
                    return

    def _least_seconds(self, found: Prediction) -> float:
        """What is left of a step, whatever its zero, shard and update are, and however well its stages are balanced."""
        return self._least_span(found) / self._pricing.slowdown()

    def _least_span(self, found: Prediction) -> float:
        """What computing and waiting take, however well the stages are balanced."""
        is_open = found.plan.num_stages > 1 and self._ask.is_open("stages")
        return _span(found) * (self._pricing.balance(found.plan) if is_open else 1.0)

    def _may_be_kept(self, seconds: float) -> bool:
        return seconds <= self._best * self._margin * ROUNDING

    def _estimate(self, fields: Fields) -> Prediction | None:
        """The estimate of a plan, which is put where it belongs; None: it cannot be carried out."""
        key = tuple(sorted(fields.items()))
        if key not in self._estimates:
            self._estimates[key] = found = self._try_estimate(fields)
            if found is not None:
                self.found.num_estimated += 1
                self._file(found)
        return self._estimates[key]

    def _try_estimate(self, fields: Fields) -> Prediction | None:
        plan = self._candidate(fields)
        try:
            return None if plan is None else self._pricing.estimate(plan)
        except PlanError as error:
            self._note(error.problems)
            return None

    def _file(self, found: Prediction) -> None:
        if found.memory.total > self._limit:
            self.found.too_large.append(found)
            return
        self.found.front.append(found)
        if not self._may_be_kept(found.seconds):
            return
        if problems := self._pricing.problems(found.plan):
            self._note(problems)
            return
        self.found.kept.append(found)
        self._progress.offer(found)
        self._best = min(self._best, found.seconds)

    def _note(self, problems: Sequence[Problem]) -> None:
        self.found.problems |= dict.fromkeys(problems)


def _span(found: Prediction) -> float:
    terms = found.terms
    return terms.compute + terms.recompute + terms.tensor + terms.sequence + terms.bubble


def _of_variant(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in (*SHARD_FIELDS, "update")}


def _mesh_of(fields: Fields) -> tuple[Any, ...]:
    return tuple(fields[name] for name in MESH_FIELDS)


def _smallest(groups: Sequence[_Group]) -> list[_Group]:
    """By recompute: the group with the smallest microbatches; first those that compute most again."""
    smallest: dict[str, _Group] = {}
    for group in groups:
        known = smallest.get(group.plan.recompute)
        if known is None or group.plan.microbatches > known.plan.microbatches:
            smallest[group.plan.recompute] = group
    return list(reversed(smallest.values()))
