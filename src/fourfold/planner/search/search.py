"""Search: all plans of an ask, without those that cannot be the answer.

best     the fewest estimated seconds of a plan that fits
margin   plans within this factor of the best are kept: one of them may be the answer
lean     the variant of a group that holds least: 1F1B, everything split, gradients that are freed early
pruned   a group whose floor, seconds, or lean variant say that none of its plans is within the margin and fits
Law: the kept plans are those of a full enumeration with even stages, and some with better ones.

Three facts about estimates make it exact. The schedule changes waiting and activations; zero, shard and update change
the rest of the memory, what is exposed, and the update; of one mesh and `recompute`, a larger microbatch holds no less.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import PLAN_FIELDS
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.decision import Progress
from fourfold.planner.search.space import GROUP_FIELDS, VARIANT_FIELDS, Fields, Space, choices, expand, groups
from fourfold.planner.search.step_pricing import StepPricing
from fourfold.words.errors import PlanError, Problem

MESH_FIELDS = tuple(name for name in GROUP_FIELDS if name not in ("microbatches", "recompute"))
CUT_FIELDS = ("precision", "tp", "cp", "ulysses", "ring", "sequence_parallel", "recompute")
RECOMPUTES = PLAN_FIELDS["recompute"].choices
SCHEDULE_FIELDS = ("schedule", "interleave", "max_in_flight")
SHARD_FIELDS = ("zero", "shard")
FRONT_RANGE = 2.0  # plans slower than this factor of the best are not worth the memory that they save
MAX_FRONT_GROUPS = 2000
ROUNDING = 1 + 1e-9  # of sums in another order
_T = TypeVar("_T")


PREDICTION_ERROR = 0.05  # of a step: what `bench.predict` aims at in the mean
NO_DIMS: Mapping[str, bool] = {}


class Question(NamedTuple):
    """What is asked, among which plans, on what.

    limit_bytes  what a rank may hold
    dims         that the task's tensor rules name, and whether they are on the tensor axis without a plan's `dims`
    error        of a prediction
    deadline     of `time.monotonic`: no group is begun after it, if a plan has been found by then
    progress     None: nobody waits for it
    """

    ask: Ask
    space: Space
    pricing: StepPricing
    limit_bytes: float
    dims: Mapping[str, bool] = NO_DIMS
    error: float = PREDICTION_ERROR
    deadline: float = math.inf
    progress: Progress | None = None

    def within(self, **changes: Any) -> "Question":
        """A question that is a part of this one: it takes the time that it takes, and shows no progress of its own."""
        return self._replace(deadline=math.inf, progress=None, **changes)


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
    num_unseen: int = 0
    """Groups that the time did not suffice for, although a plan of theirs may be kept."""

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

    smallest  by `recompute`: the group with the smallest microbatches; first the one that computes most again
    """

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.groups = groups
        by_size = sorted(groups, key=lambda group: group.plan.microbatches)
        smallest = {group.plan.recompute: group for group in by_size}
        self.smallest = {name: smallest[name] for name in reversed(RECOMPUTES) if name in smallest}


def search(question: Question, *, margin: float, best: float = math.inf) -> Found:
    """The plans of an ask that fit and are within the margin of the best.

    best  the seconds of a plan that is known already; infinite: none
    """
    searcher = _Searcher(question, margin, best)
    searcher.run()
    found = searcher.found
    limit = min(found.best, best) * margin
    found.kept = [each for each in found.kept if each.seconds <= limit]
    return found


def first_fitting(question: Question) -> Plan | None:
    """Some plan of an ask that fits; None: there is none."""
    searcher = _Searcher(question, 1.0, math.inf)
    for mesh in searcher.meshes():
        if any(map(searcher.has_lean, mesh.smallest.values())) and searcher.found.kept:
            return searcher.found.kept[0].plan
    return None


class _Searcher:
    """One pass over the groups, most promising first."""

    def __init__(self, question: Question, margin: float, best: float) -> None:
        self._ask, self._space, self._pricing, self._limit = question[:4]
        self._deadline, self._progress = question.deadline, question.progress or Progress()
        self._margin, self._best = margin, best
        self.found = Found()
        self._estimates: dict[tuple[tuple[str, Any], ...], Prediction | None] = {}
        # By mesh and recompute: the most microbatches, so the smallest ones, with which the lean variant does not fit.
        self._too_large: dict[tuple[Any, ...], int] = {}

    def run(self) -> None:
        explored, num_left = set[tuple[Any, ...]](), MAX_FRONT_GROUPS
        # What ranks compute and hold is long to count: of samples that are cut, only for plans that may be kept.
        meshes = [list(each) for _, each in itertools.groupby(groups(self._ask, self._space), key=_mesh_of)]
        for is_cut in (False, True):
            of_cut = [members for members in meshes if (members[0]["cp"] > 1) == is_cut]
            num_left = self._run_meshes(of_cut, explored, num_left)

    def _run_meshes(self, meshes: Sequence[Sequence[Fields]], explored: set[tuple[Any, ...]], num_left: int) -> int:
        """Explore the groups of some meshes. Returns how many more may be looked at for the front alone."""
        self._progress.begin("counting what ranks compute", len(meshes))
        queue: list[tuple[_Group, _Mesh]] = []
        for members in meshes:
            self._progress.done += 1
            if self._is_late():
                self.found.num_unseen += len(members)
                continue
            mesh = self._mesh(members)
            queue += [(group, mesh) for group in mesh.groups]
        self._progress.begin("searching", len(queue))
        for group, mesh in sorted(queue, key=lambda pair: pair[0].floor):
            self._progress.done += 1
            if self._is_late():
                self.found.num_unseen += self._may_be_kept(group.floor)
                continue
            cut = tuple(group.fields[name] for name in CUT_FIELDS)
            timed = self._timed(group) if self._may_be_kept(group.floor) else []
            if is_fast := any(map(self._is_fast, timed)):
                explored.add(cut)
            elif num_left and (group.plan.cp == 1 or cut in explored) and group.floor <= self._best * FRONT_RANGE:
                num_left -= 1
            else:
                continue
            if self.has_lean(mesh.smallest[group.plan.recompute]) and self.has_lean(group) and is_fast:
                self._explore(group)
            else:  # the fastest ones are points of the front, or would be faster than the answer and do not fit
                self._estimate_fastest(group, timed)
        return num_left

    def _is_late(self) -> bool:
        return self._best < math.inf and time.monotonic() > self._deadline

    def meshes(self) -> Iterator[_Mesh]:
        for _, members in itertools.groupby(groups(self._ask, self._space), key=_mesh_of):
            yield self._mesh(members)

    def _mesh(self, members: Iterable[Fields]) -> _Mesh:
        return _Mesh([group for fields in members if (group := self._group(fields)) is not None])

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

    def has_lean(self, group: _Group) -> bool:
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

    def _timed(self, group: _Group) -> list[Prediction]:
        """The plans of a group, each schedule as far as it may be kept, and the first plan of each."""
        schedules = expand(SCHEDULE_FIELDS, group.fields, self._ask, self._space)
        return [timed for schedule in schedules for timed in self._timed_variants(schedule)]

    def _timed_variants(self, schedule: Fields) -> Iterator[Prediction]:
        for fields in expand((*SHARD_FIELDS, "update"), schedule, self._ask, self._space):
            timed = self._time(fields)
            if timed is not None:
                yield timed
                if not self._may_be_kept(self._least_seconds(timed)):
                    return

    def _estimate_fastest(self, group: _Group, timed: Sequence[Prediction]) -> None:
        """Estimate the fastest plan with each schedule."""
        slowest_first = sorted(timed, key=lambda each: -each.terms.total)
        for each in {each.plan.schedule: each for each in slowest_first}.values():
            self._estimate({**group.fields, **_of_variant(each.plan)})

    def _explore(self, group: _Group) -> None:
        """Estimate the variants of a group that may be kept."""
        for schedule in expand(SCHEDULE_FIELDS, group.fields, self._ask, self._space):
            shards = list(expand(SHARD_FIELDS, schedule, self._ask, self._space))
            first = next(self._timed_variants(schedule), None)
            if first is None or not self._may_be_kept(self._least_seconds(first)):
                continue
            even = [found for each in shards for found in self._explore_updates(each)]
            for stages in self._divisions(even):
                for found in even:
                    if self._is_fast(found):
                        self._estimate({**schedule, **_of_variant(found.plan), "stages": stages})

    def _divisions(self, even: Sequence[Prediction]) -> list[str]:
        """Other divisions into stages, if one may bring a plan within the margin, or make it fit."""
        if not any(map(self._is_fast, even)) or even[0].plan.num_stages == 1 or not self._ask.is_open("stages"):
            return []
        fitting = [each for each in even if each.memory.total <= self._limit]
        plans = dict.fromkeys(each.plan for each in (*even[:1], *fitting[:1]))
        return list(dict.fromkeys(text for plan in plans for text in self._pricing.divisions(plan, self._limit)))

    def _explore_updates(self, fields: Fields) -> Iterator[Prediction]:
        """The update modes of a plan; of a plan that is too slow even without updates, the first one only."""
        for update in choices("update", fields, self._ask, self._space):
            found = self._estimate({**fields, "update": update})
            if found is not None:
                yield found
                if not self._may_be_kept(self._least_seconds(found)):
                    return

    def _is_fast(self, found: Prediction) -> bool:
        """Whether a plan may be kept, if it fits, with some division into stages."""
        return self._may_be_kept(found.terms.total - _span(found) + self._least_span(found))

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
            self._estimates[key] = found = self._priced(fields, self._pricing.estimate)
            if found is not None:
                self.found.num_estimated += 1
                self._file(found)
        return self._estimates[key]

    def _time(self, fields: Fields) -> Prediction | None:
        """The estimate of a plan without what it holds; None: it cannot be carried out."""
        return self._priced(fields, lambda plan: Prediction(plan, self._pricing.terms(plan), (), {}))

    def _priced(self, fields: Fields, price: Callable[[Plan], _T]) -> _T | None:
        plan = self._candidate(fields)
        try:
            return None if plan is None else price(plan)
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
    return terms.compute + terms.recompute + terms.tensor + terms.context + terms.bubble


def _of_variant(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in VARIANT_FIELDS}


def _mesh_of(fields: Fields) -> tuple[Any, ...]:
    return tuple(fields[name] for name in MESH_FIELDS)
