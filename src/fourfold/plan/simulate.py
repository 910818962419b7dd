"""Simulation: when each action of a program begins and ends, given the cost of each.

clock    the time until which a lane is occupied
done     when a rank has done its part of an action; some actions end only when every rank has
overlap  how long before a dependency ends an action may begin: a bucket is ready before backward ends, and a forward
         needs the weights of its last layers last
Law: an action begins as soon as its lane is free and its dependencies have ended, less its overlaps; never earlier.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.dependencies import Dependencies, Dependency, RanksByMemory
from fourfold.plan.rank_program import lane_of
from fourfold.words.errors import Problem
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, Program, ProgramError, Verb
from fourfold.words.trace_events import GATHER_LANE, LANES

CostFunction = Callable[[int, Action], float]
OverlapFunction = Callable[[int, Action, Dependency], float]
NUM_CONTEXT_ACTIONS = 3  # that an error shows before and after the action at which a lane is stuck


class TimedAction(NamedTuple):
    """An action with its start and end, in seconds since the step began."""

    action: Action
    start: float
    end: float


Timeline = Mapping[int, tuple[TimedAction, ...]]


RECEIVE_QUEUE = "receive"
QUEUES = (*LANES, RECEIVE_QUEUE)
RECEIPTS = (Verb.RECEIVE_FORWARD, Verb.RECEIVE_BACKWARD, Verb.TIE)


def _queue_of(action: Action) -> str:
    """The lane of an action. Receipts have one of their own: a message that comes does not wait for those that go.

    A tied weight is received in front of the first message, and with it the first forward waits for it.
    """
    return RECEIVE_QUEUE if action.verb in RECEIPTS else lane_of(action)


def no_overlap(rank: int, action: Action, needed: Dependency) -> float:
    """The overlap of programs whose actions wait for the end of their dependencies."""
    return 0.0


def simulate(
    program: Program,
    cost: CostFunction,
    *,
    overlap: OverlapFunction = no_overlap,
    mesh: Mesh | None = None,
    ranks_by_memory: RanksByMemory = (),
    begins: Mapping[int, float] | None = None,
) -> dict[int, tuple[TimedAction, ...]]:
    """The timeline of one step, by rank, in the order of the program. `cost` and `overlap` are in seconds.

    `mesh`: the places of the ranks; None: all are data ranks. `ranks_by_memory`: those that meet in shared memory.
    `begins`: when each rank reaches its first action; None: all at 0.

    Raises ProgramError for a program that deadlocks; the message shows where each rank is stuck.
    """
    _check_no_repeats(program)
    simulator = _Simulator(program, Dependencies(program, mesh, ranks_by_memory), cost, overlap, begins or {})
    simulator.run()
    if simulator.has_pending():
        raise ProgramError(simulator.problems(), where="the program: it cannot end")
    return {rank: tuple(simulator.times[rank, action] for action in actions) for rank, actions in program.items()}


def _check_no_repeats(program: Program) -> None:
    problems = [
        Problem(f"rank {rank}: {action} {count} times", "each action once")
        for rank, actions in program.items()
        for action, count in Counter(actions).items()
        if count > 1
    ]
    if problems:
        raise ProgramError(problems, where="the program")


def makespan(timeline: Timeline) -> float:
    """Seconds from the first start to the last end."""
    times = [timed for actions in timeline.values() for timed in actions]
    return max(timed.end for timed in times) - min(timed.start for timed in times) if times else 0.0


class _Simulator:
    """A queue and a clock per rank and lane, and the times assigned so far.

    Every lane is tried again when something that it waits for has a time; whatever the order, the times are the same.
    """

    def __init__(
        self,
        program: Program,
        dependencies: Dependencies,
        cost: CostFunction,
        overlap: OverlapFunction,
        begins: Mapping[int, float],
    ) -> None:
        self._program, self._dependencies, self._cost, self._overlap = program, dependencies, cost, overlap
        queues: dict[tuple[int, str], list[Action]] = {(rank, lane): [] for rank in program for lane in QUEUES}
        for rank, actions in program.items():
            for action in actions:
                queues[rank, _queue_of(action)].append(action)
        self._queues = {key: queue for key, queue in queues.items() if queue}
        self._next = dict.fromkeys(self._queues, 0)
        self._clocks = {(rank, lane): begins.get(rank, 0.0) for rank, lane in self._queues}
        self._waiting: dict[Dependency, list[tuple[int, str]]] = {}
        """By what has no time yet: the lanes that are tried again then."""
        self._to_try = deque(self._queues)
        self.times: dict[tuple[int, Action], TimedAction] = {}
        self._done: dict[tuple[int, Action], float] = {}

    def next_action(self, rank: int, lane: str) -> Action | None:
        """The first action of a lane that has no time yet."""
        queue = self._queues.get((rank, lane), ())
        index = self._next.get((rank, lane), 0)
        return queue[index] if index < len(queue) else None

    def has_pending(self) -> bool:
        return any(self.next_action(*key) is not None for key in self._queues)

    def run(self) -> None:
        """Assign times to all actions; to as many as possible, if the program deadlocks."""
        while self._to_try:
            rank, lane = self._to_try.popleft()
            while (action := self.next_action(rank, lane)) is not None and self._schedule(rank, lane, action):
                pass

    def _schedule(self, rank: int, lane: str, action: Action) -> bool:
        """Assign times to the next action of a lane, on all ranks that take part in it, if that is possible."""
        ranks = self._dependencies.ends_with(rank, action)
        if len(ranks) == 1 and len(self._dependencies.participants(rank, action)) == 1:
            return self._schedule_alone(rank, lane, action)
        meetings = {tuple(self._dependencies.participants(each, action)) for each in ranks}
        starts: dict[int, float] = {}
        for participants in meetings:
            start = self._start_of_meeting(participants, lane, action)
            if start is None:
                return False
            starts |= dict.fromkeys(participants, start)
        for participants in meetings:
            done = starts[participants[0]] + max(self._cost(each, action) for each in participants)
            for each in participants:
                self._done[each, action] = done
        end = max(self._done[each, action] for each in starts)
        for each, start in starts.items():
            self._assign(each, lane, TimedAction(action, start, end))
            if each != rank:
                self._to_try.append((each, lane))
        return True

    def _schedule_alone(self, rank: int, lane: str, action: Action) -> bool:
        start = self._earliest_start(rank, lane, action)
        if isinstance(start, Dependency):
            self._waiting.setdefault(start, []).append((rank, lane))
            return False
        end = self._done[rank, action] = start + self._cost(rank, action)
        self._assign(rank, lane, TimedAction(action, start, end))
        return True

    def _assign(self, rank: int, lane: str, timed: TimedAction) -> None:
        key = Dependency(rank, timed.action)
        self.times[key] = timed
        self._clocks[rank, lane] = timed.end
        self._next[rank, lane] += 1
        if key in self._waiting:
            self._to_try.extend(self._waiting.pop(key))

    def _start_of_meeting(self, participants: Sequence[int], lane: str, action: Action) -> float | None:
        """When ranks can begin an action together; None while that is not known: the last one to come finds it out."""
        if any(self.next_action(each, lane) != action for each in participants):
            return None
        latest = -math.inf
        for each in participants:
            start = self._earliest_start(each, lane, action)
            if isinstance(start, Dependency):
                self._waiting.setdefault(start, []).append((each, lane))
                return None
            latest = max(latest, start)
        return latest

    def _earliest_start(self, rank: int, lane: str, action: Action) -> float | Dependency:
        """When an action can begin on one rank; else a dependency that has no time yet."""
        start = self._clocks[rank, lane]
        for dependency in self._dependencies.of(rank, action):
            timed = self.times.get(dependency)
            if timed is None:
                return dependency
            overlap = self._overlap(rank, action, dependency)
            # What overlaps with an action that ends on all ranks together does not wait for the others.
            ready = self._done[dependency] - overlap if overlap else timed.end
            # A forward or backward may begin before the weights that it uses last are even on their way; but a gradient
            # is ready no earlier than its backward begins.
            start = max(start, ready if lane_of(dependency.action) == GATHER_LANE else max(ready, timed.start))
        return start

    def problems(self) -> list[Problem]:
        """Where each rank is stuck, and what it waits for."""
        return [
            Problem(f"rank {rank}, {lane}: {self._context(rank, action)}", self._waiting_for(rank, lane, action))
            for rank, lane in self._queues
            if (action := self.next_action(rank, lane)) is not None
        ]

    def _context(self, rank: int, action: Action) -> str:
        """The action and its neighbours in the program, with a mark in front of the action."""
        actions = self._program[rank]
        index = actions.index(action)
        low, high = max(0, index - NUM_CONTEXT_ACTIONS), index + NUM_CONTEXT_ACTIONS + 1
        words = [f"▸{each}" if each == action else str(each) for each in actions[low:high]]
        return " ".join([*(["…"] if low else []), *words, *(["…"] if high < len(actions) else [])])

    def _waiting_for(self, rank: int, lane: str, action: Action) -> str:
        missing = []
        for dependency in self._dependencies.of(rank, action):
            if dependency not in self.times:
                exists = dependency.action in self._program.get(dependency.rank, ())
                suffix = "" if exists else ", which is in no program"
                missing.append(f"{dependency.action} of rank {dependency.rank}{suffix}")
        others = self._dependencies.participants(rank, action)
        missing += [f"rank {each} to come to {action} too" for each in others if self.next_action(each, lane) != action]
        return ", ".join(missing[:NUM_CONTEXT_ACTIONS]) or "the other ranks of this collective"
