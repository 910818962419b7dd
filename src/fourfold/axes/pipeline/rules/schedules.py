"""Schedules: in which order each pipeline index computes the forwards and backwards of a step.

schedule    a row of `SCHEDULES`: a function that makes the lists, and what it can be made for
lists       by pipeline index, its compute actions in order
warm-up     the forwards of an index in front of its first backward
stash       the versions that a stage keeps: those that its microbatches in flight use, and the newest one
drain       the backwards that are left after the last batch's forwards
I, W        the backward of a stage's inputs, for which the stage before it waits; that of its weights: nobody waits
limit       how many microbatches an index may have in flight, from F to W
preference  what an index begins when it could begin several actions; the search tries all of them
block   the compute time of one microbatch on one stage, equal on all stages
span    from an index's first action to the end of its last one; in the zero-bubble schedules indexes begin and end
        their steps one after the other, so that the span of one is shorter than that of all together
bubble  the most that any index waits within its span, over what it computes
Law: a schedule's lists hold every forward and backward of every stage and microbatch once, and they end. Every stage
runs its backwards in order of microbatch, so that all schedules sum gradients in one order.
Law: the steps of all batches and the drain are the whole list in order, and no step waits for a later one.
Law: no index ever has more microbatches in flight than the limit, and no index waits while it could begin an F or an I
within the limit.
Law: the simulated bubble is that of the papers, if messages take no time.

Sources: GPipe (Huang et al., 1811.06965); 1F1B: PipeDream-Flush (Narayanan et al., 2006.09503) and DAPPLE (Fan et al.,
2007.01045); interleaved 1F1B (Narayanan et al., 2104.04473, §2.2); PipeDream (Narayanan et al., SOSP 2019): with stage
k of n counted from 1, batch t uses w_k(t − n + k); PipeDream-2BW (2006.09503): batch t uses w(t − 1) on every stage;
Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241): with a limit of pp the bubble is that of ZB-H1, with
2 pp − 1 that of ZB-H2; the search is the heuristic of its section 3.1.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fourfold.axes.pipeline.rules.checker import read_written
from fourfold.axes.pipeline.rules.spec import EQUAL_COSTS, BlockCosts, ComputeLists, PipelineSpec
from fourfold.plan.dependencies import Dependencies, Dependency
from fourfold.plan.simulate import simulate
from fourfold.words.errors import Problem, closest_match
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, Verb

# ---- gpipe, 1f1b, interleaved --------------------------------------------------------------------------------------


def gpipe(spec: PipelineSpec) -> ComputeLists:
    """All forwards, then all backwards. These run in order of microbatch, so gradients are summed as in 1F1B."""
    return tuple(
        tuple(Action(verb, stage, i) for verb in (Verb.FORWARD, Verb.BACKWARD) for i in range(spec.microbatches))
        for stage in range(spec.pp)
    )


def one_f_one_b(spec: PipelineSpec) -> ComputeLists:
    """A warm-up of pp − 1 − stage forwards, then one forward and one backward in turn: pp − stage in flight."""
    return tuple(
        _alternate(
            [Action(Verb.FORWARD, stage, i) for i in range(spec.microbatches)],
            [Action(Verb.BACKWARD, stage, i) for i in range(spec.microbatches)],
            warm_up=spec.pp - 1 - stage,
        )
        for stage in range(spec.pp)
    )


def interleaved(spec: PipelineSpec) -> ComputeLists:
    """1F1B over the chunks of each index: pp microbatches go through one chunk, then through the next one."""
    lists = []
    for index in range(spec.pp):
        forwards = [Action(Verb.FORWARD, chunk * spec.pp + index, i) for chunk, i in _chunk_order(spec)]
        last = spec.num_stages - spec.pp + index
        backwards = [Action(Verb.BACKWARD, last - chunk * spec.pp, i) for chunk, i in _chunk_order(spec)]
        # Twice that of 1F1B, as in Megatron: every hop there and back has the time of a block for its message. With
        # messages of a tenth of a forward, pp 4, 8 microbatches and interleave 2, simulated: bubble 0.248, not 0.260.
        warm_up = 2 * (spec.pp - 1 - index) + (spec.interleave - 1) * spec.pp
        lists.append(_alternate(forwards, backwards, warm_up=warm_up))
    return tuple(lists)


def _chunk_order(spec: PipelineSpec) -> Iterator[tuple[int, int]]:
    """Chunk and microbatch, in groups of pp microbatches."""
    for first in range(0, spec.microbatches, spec.pp):
        for chunk in range(spec.interleave):
            for microbatch in range(first, first + spec.pp):
                yield chunk, microbatch


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int) -> tuple[Action, ...]:
    """The warm-up, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    actions = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - warm_up :])


# ---- asynchronous --------------------------------------------------------------------------------------------------

ASYNCHRONOUS = ("pipedream", "2bw")


def undrained(spec: PipelineSpec) -> ComputeLists:
    """1F1B over the microbatches of all batches in a row. A stage updates its weights after a batch's last backward."""
    return one_f_one_b(spec._replace(microbatches=spec.num_batches * spec.microbatches))


def batch_actions(spec: PipelineSpec, batch: int) -> ComputeLists:
    """What each index does in the step of a batch, counted from 0: its forwards, each with the backward that follows it
    in `undrained`. In the first steps some have none yet.
    """
    microbatches = range(batch * spec.microbatches, (batch + 1) * spec.microbatches)
    return tuple(
        tuple(action for i in microbatches for action in _forward_and_backward(stage, i, spec.pp - 1 - stage))
        for stage in range(spec.pp)
    )


def steady_actions(spec: PipelineSpec) -> ComputeLists:
    """What each index does in a step once the pipeline is filled. Microbatches are numbered within their batches: a
    backward is of the oldest microbatch in flight.
    """
    filled = spec.pp  # batches after which all indexes have as many in flight as they ever have
    return tuple(
        tuple(Action(each.verb, each.stage, each.index % spec.microbatches) for each in actions)
        for actions in batch_actions(spec, filled)
    )


def warm_up(spec: PipelineSpec, stage: int) -> int:
    """How many microbatches a stage has in flight between steps."""
    return spec.pp - 1 - stage


def batches_in_flight(spec: PipelineSpec) -> int:
    """How many batches the first stage has begun and not ended, between steps."""
    return -(-warm_up(spec, 0) // spec.microbatches)


def _forward_and_backward(stage: int, microbatch: int, warm_up: int) -> list[Action]:
    forward = Action(Verb.FORWARD, stage, microbatch)
    return [forward, Action(Verb.BACKWARD, stage, microbatch - warm_up)] if microbatch >= warm_up else [forward]


def staleness(schedule: str, spec: PipelineSpec, stage: int) -> int:
    """How many updates a stage's weights miss in the forwards and backwards of a batch."""
    return {"pipedream": spec.pp - 1 - stage, "2bw": 1}.get(schedule, 0)


def num_stashed(schedule: str, spec: PipelineSpec, stage: int) -> int:
    """How many versions of its weights a stage keeps, the newest one included."""
    return {"pipedream": spec.pp - stage, "2bw": 2}.get(schedule, 1)


# ---- zero bubble ---------------------------------------------------------------------------------------------------

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


# ---- bubbles -------------------------------------------------------------------------------------------------------


def simulated_bubble(
    lists: Sequence[Sequence[Action]], costs: BlockCosts = EQUAL_COSTS, *, ends_together: bool = False
) -> float:
    """The bubble of lists with or without messages.

    `ends_together`: all indexes wait for the last one before their updates, for the norm of all gradients or for
    whether one of them is not finite; so the span of each is that of all together.
    """
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    timeline = simulate(program, lambda _, action: costs.of(action), mesh=Mesh(pp=len(lists)))
    computing = [[timed for timed in times if costs.of(timed.action)] for times in timeline.values()]
    spans = [(times[0].start, times[-1].end) for times in computing]
    if ends_together:
        spans = [(min(start for start, _ in spans), max(end for _, end in spans))] * len(spans)
    busy = [sum(costs.of(timed.action) for timed in times) for times in computing]
    return max((stop - start - own) / own for (start, stop), own in zip(spans, busy, strict=True))


# ---- the table -----------------------------------------------------------------------------------------------------


PROGRAM_EXAMPLE = "program=FILE with lines such as 0: F0.0 B0.0"


class Schedule(NamedTuple):
    """A row of the table: the function that makes the lists, and what it can be made for.

    divides_backward  whether its lists have both halves of each backward; None: the lists say
    """

    make: Callable[[PipelineSpec], ComputeLists]
    problems: Callable[[PipelineSpec], list[Problem]]
    divides_backward: bool | None = False


def compute_actions(schedule: str, **sizes: Any) -> ComputeLists:
    """By pipeline index, the compute actions of one step, or of several batches of an asynchronous schedule, which
    `batch_actions` divides into steps. The index of an action is its microbatch, counted over all batches.

    sizes  those of `PipelineSpec`, of which `schedule_problems` finds none
    """
    return SCHEDULES[schedule].make(PipelineSpec(**sizes))


def schedule_problems(schedule: str, **sizes: Any) -> list[Problem]:
    """Why a schedule cannot be made for these sizes, those of `PipelineSpec`, and what would work."""
    if schedule not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        return [Problem(f"schedule = {schedule!r}", f"one of {names}", closest_match(schedule, SCHEDULES) or "")]
    spec = PipelineSpec(**sizes)
    return _limit_problems(schedule, spec) + SCHEDULES[schedule].problems(spec)


def _limit_problems(schedule: str, spec: PipelineSpec) -> list[Problem]:
    if spec.max_in_flight is None:
        return []
    got = f"a limit of {spec.max_in_flight} microbatches in flight"
    if schedule != "zero-bubble":
        return [Problem(f'schedule = "{schedule}", {got}', "no limit: it has its own", 'schedule = "zero-bubble"')]
    return [] if spec.max_in_flight > 0 else [Problem(got, "at least 1", f"{spec.pp}, as in 1F1B")]


def _one_stage_each(spec: PipelineSpec) -> list[Problem]:
    if spec.interleave == 1:
        return []
    return [Problem(f"interleave = {spec.interleave}", "1 without interleaving", 'schedule = "interleaved"')]


def _interleaved_problems(spec: PipelineSpec) -> list[Problem]:
    problems = []
    if spec.interleave == 1:
        problems.append(
            Problem(
                'schedule = "interleaved", interleave = 1', "interleave ≥ 2", 'interleave = 2, or schedule = "1f1b"'
            )
        )
    if spec.microbatches % spec.pp:
        below, above = spec.microbatches // spec.pp * spec.pp, -(-spec.microbatches // spec.pp) * spec.pp
        choices = f"microbatches = {above}" if not below else f"microbatches = {below} or {above}"
        got = f'schedule = "interleaved", microbatches = {spec.microbatches}'
        problems.append(Problem(got, f"microbatches divisible by pp = {spec.pp}", f'{choices}, or schedule = "1f1b"'))
    return problems


def _pipedream_problems(spec: PipelineSpec) -> list[Problem]:
    problems = _one_stage_each(spec)
    if spec.microbatches > 1:
        got = f'schedule = "pipedream", microbatches = {spec.microbatches}'
        problems.append(Problem(got, "microbatches = 1: it updates after every backward", 'schedule = "2bw"'))
    return problems


def _two_buffered_problems(spec: PipelineSpec) -> list[Problem]:
    problems = _one_stage_each(spec)
    if spec.microbatches < spec.pp:
        got = f'schedule = "2bw", microbatches = {spec.microbatches}'
        problems.append(Problem(got, f"at least pp = {spec.pp}", f"microbatches = {spec.pp}"))
    return problems


def _written(spec: PipelineSpec) -> ComputeLists:
    """The lists of a program that a user has written."""
    return read_written(spec.program, spec)[0]


def _written_problems(spec: PipelineSpec) -> list[Problem]:
    if not spec.program.strip():
        return [
            Problem('schedule = "written" without a program', "a line of actions for each rank of pp", PROGRAM_EXAMPLE)
        ]
    return read_written(spec.program, spec)[1]


SCHEDULES = {
    "gpipe": Schedule(gpipe, _one_stage_each),
    "1f1b": Schedule(one_f_one_b, _one_stage_each),
    "interleaved": Schedule(interleaved, _interleaved_problems),
    "zero-bubble": Schedule(zero_bubble, _one_stage_each, divides_backward=True),
    "pipedream": Schedule(undrained, _pipedream_problems),
    "2bw": Schedule(undrained, _two_buffered_problems),
    "written": Schedule(_written, _written_problems, divides_backward=None),
}
