"""Zero bubble: backward in two halves, so that gradients of weights fill the time in which an index would wait.

I, W        the backward of a stage's inputs, for which the stage before it waits; that of its weights: nobody waits
limit       how many microbatches an index may have in flight, from F to W
preference  what an index begins when it could begin several actions; the search tries all of them
Law: no index ever has more microbatches in flight than the limit, and no index waits while it could begin an F or an I
within the limit.
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241). With a limit of pp the bubble is that of ZB-H1, with
2 pp − 1 that of ZB-H2; the search is the heuristic of its section 3.1.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.dependencies import Dependencies, Dependency
from fourfold.plan.pipeline.bubble import simulated_bubble
from fourfold.plan.pipeline.spec import EQUAL_COSTS, BlockCosts, ComputeLists, PipelineSpec
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, Verb

VERBS = (Verb.FORWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT)
FORWARD, INPUT, WEIGHT = VERBS


class _Preference(NamedTuple):
    """What an index does when it could begin several actions.

    alternates  after an I comes an F, else all I that are possible
    is_patient  a W begins only if it ends before the next F or I can begin, else whenever neither can begin now
    """

    alternates: bool
    is_patient: bool


PREFERENCES = [_Preference(*each) for each in itertools.product((True, False), repeat=2)]


def zero_bubble(spec: PipelineSpec) -> ComputeLists:
    """The order with the smallest bubble at these costs, of those that the search finds.

    The order for equal costs is a candidate too: under a tight limit it is often the best for other costs.
    """
    needs = _needs(spec.pp, spec.microbatches)
    best = _best_order(spec, spec.costs, needs)
    if spec.costs == EQUAL_COSTS:
        return best
    orders = (best, _best_order(spec, EQUAL_COSTS, needs))
    return min(orders, key=lambda lists: simulated_bubble(lists, spec.costs))


def _needs(pp: int, microbatches: int) -> dict[Dependency, list[Dependency]]:
    """What every action waits for."""
    program = {
        stage: tuple(Action(verb, stage, i) for verb in VERBS for i in range(microbatches)) for stage in range(pp)
    }
    dependencies = Dependencies(program, Mesh(pp=pp))
    return {
        Dependency(stage, action): dependencies.of(stage, action)
        for stage, actions in program.items()
        for action in actions
    }


def _best_order(
    spec: PipelineSpec, costs: BlockCosts, needs: Mapping[Dependency, Sequence[Dependency]]
) -> ComputeLists:
    searches = [_Search(spec, costs, needs, preference) for preference in PREFERENCES]
    for search in searches:
        search.run()
    return min(searches, key=lambda search: search.span()).lists()


class _Search:
    """The indexes of a pipeline that choose, whenever they are free, what they begin next."""

    def __init__(
        self,
        spec: PipelineSpec,
        costs: BlockCosts,
        needs: Mapping[Dependency, Sequence[Dependency]],
        preference: _Preference,
    ) -> None:
        self._pp, self._microbatches, self._limit = spec.pp, spec.microbatches, spec.max_in_flight or spec.pp
        self._costs, self._needs, self._preference = costs, needs, preference
        self._actions: list[list[Action]] = [[] for _ in range(spec.pp)]
        self._counts = [Counter[Verb]() for _ in range(spec.pp)]
        self._starts, self._free_at = [math.inf] * spec.pp, [0.0] * spec.pp
        self._ends: dict[Dependency, float] = {}

    def run(self) -> None:
        """Go through all times at which an index is free or could begin what it waited for."""
        times = [(0.0, index) for index in range(self._pp)]
        while times:
            now, index = heapq.heappop(times)
            verb = self._choose(index, now) if self._free_at[index] <= now else None
            if verb is not None:
                end = self._begin(index, verb, now)
                # What has been made is used here or by a neighbour.
                for each in range(max(0, index - 1), min(self._pp, index + 2)):
                    heapq.heappush(times, (end, each))

    def _begin(self, index: int, verb: Verb, now: float) -> float:
        action = self._next(index, verb)
        end = now + self._costs.of(action)
        self._actions[index].append(action)
        self._counts[index][verb] += 1
        self._starts[index] = min(now, self._starts[index])
        self._free_at[index] = self._ends[Dependency(index, action)] = end
        return end

    def _next(self, index: int, verb: Verb) -> Action:
        return Action(verb, index, self._counts[index][verb])

    def _choose(self, index: int, now: float) -> Verb | None:
        """What a free index begins; None: it waits."""
        ready = {verb: self._ready_at(index, verb) for verb in VERBS}
        possible = [verb for verb in (INPUT, FORWARD) if ready[verb] <= now]
        if len(possible) == 2 and self._preference.alternates:
            return FORWARD if self._last_chain_verb(index) == INPUT else INPUT
        if possible:
            return possible[0]
        if ready[WEIGHT] > now:
            return None
        delays = min(ready[INPUT], ready[FORWARD]) < now + self._costs.backward_weight
        must_free = self._in_flight(index) == self._limit
        return None if delays and self._preference.is_patient and not must_free else WEIGHT

    def _ready_at(self, index: int, verb: Verb) -> float:
        """When the next action of a verb can begin; infinite: not before another action has been."""
        if self._counts[index][verb] == self._microbatches or (
            verb == FORWARD and self._in_flight(index) == self._limit
        ):
            return math.inf
        needs = self._needs[Dependency(index, self._next(index, verb))]
        return max((self._ends.get(each, math.inf) for each in needs), default=0.0)

    def _in_flight(self, index: int) -> int:
        return self._counts[index][FORWARD] - self._counts[index][WEIGHT]

    def _last_chain_verb(self, index: int) -> Verb | None:
        return next((action.verb for action in reversed(self._actions[index]) if action.verb != WEIGHT), None)

    def span(self) -> float:
        """The longest time from an index's first action to the end of its last one."""
        return max(end - start for start, end in zip(self._starts, self._free_at, strict=True))

    def lists(self) -> ComputeLists:
        """By index, what it began."""
        return tuple(map(tuple, self._actions))
