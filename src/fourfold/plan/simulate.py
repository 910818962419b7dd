"""Simulate: when each action of a program begins and ends, if each costs what its price says.

clock  the time up to which a lane is taken
lead   how long before its needs have all ended an action may begin: a bucket is ready before backward is over
Law: an action begins when its lane is free and its needs have ended, less its lead, and never before that.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fourfold.plan.dependencies import Dependencies, lane_of
from fourfold.words.errors import Problem
from fourfold.words.program import Action, Program, ProgramError
from fourfold.words.trace_events import LANES

CostFunction = Callable[[int, Action], float]
NUM_CONTEXT_ACTIONS = 3  # actions that an error shows before and after the one a lane stands at


class TimedAction(NamedTuple):
    """An action and its time, in seconds since the step began."""

    action: Action
    start: float
    end: float


Timeline = Mapping[int, tuple[TimedAction, ...]]


def no_overlap(rank: int, action: Action) -> float:
    return 0.0


def simulate(
    program: Program, cost: CostFunction, *, overlap: CostFunction = no_overlap
) -> dict[int, tuple[TimedAction, ...]]:
    """The timeline of one step, by rank, in the program's order. `price` and `lead` are in seconds.

    Raises ProgramError for a program that cannot end; the message shows where each rank stands.
    """
    _check_no_repeats(program)
    state = _Simulator(program, cost, overlap)
    while state.advance():
        pass
    if state.has_pending():
        raise ProgramError(state.problems(), where="the program: it cannot end")
    return {rank: tuple(state.times[rank, each] for each in actions) for rank, actions in program.items()}


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
    """Seconds from the first beginning to the last end."""
    times = [each for actions in timeline.values() for each in actions]
    return max(each.end for each in times) - min(each.start for each in times) if times else 0.0


class _Simulator:
    """Queues, clocks, and what has been given its time."""

    def __init__(self, program: Program, price: CostFunction, lead: CostFunction) -> None:
        self._program, self._cost, self._overlap = program, price, lead
        self._dependencies = Dependencies(program)
        self._queues = {
            (rank, name): [action for action in actions if lane_of(action) == name]
            for rank, actions in program.items()
            for name in LANES
        }
        self._next = dict.fromkeys(self._queues, 0)
        self._clocks = dict.fromkeys(self._queues, 0.0)
        self.times: dict[tuple[int, Action], TimedAction] = {}

    def next_action(self, rank: int, name: str) -> Action | None:
        queue, place = self._queues[rank, name], self._next[rank, name]
        return queue[place] if place < len(queue) else None

    def has_pending(self) -> bool:
        return any(self.next_action(*key) is not None for key in self._queues)

    def advance(self) -> bool:
        """Give every lane's next action its time where that is known; whether there was any."""
        moved = False
        for rank, name in self._queues:
            while (action := self.next_action(rank, name)) is not None and self._schedule(rank, name, action):
                moved = True
        return moved

    def _schedule(self, rank: int, name: str, action: Action) -> bool:
        members = self._dependencies.participants(rank, action)
        if any(self.next_action(member, name) != action for member in members):
            return False
        starts = [self._earliest_start(member, name, action) for member in members]
        if None in starts:
            return False
        start = max(each for each in starts if each is not None)
        end = start + max(self._cost(member, action) for member in members)
        for member in members:
            self.times[member, action] = TimedAction(action, start, end)
            self._clocks[member, name] = end
            self._next[member, name] += 1
        return True

    def _earliest_start(self, rank: int, name: str, action: Action) -> float | None:
        start = self._clocks[rank, name]
        lead = self._overlap(rank, action)
        for need in self._dependencies.of(rank, action):
            met = self.times.get(need)
            if met is None:
                return None
            start = max(start, met.start, met.end - lead)
        return start

    def problems(self) -> list[Problem]:
        """Where each rank stands, and what it waits for."""
        return [
            Problem(f"rank {rank}, {name}: {self._context(rank, action)}", self._waiting_for(rank, name, action))
            for rank, name in self._queues
            if (action := self.next_action(rank, name)) is not None
        ]

    def _context(self, rank: int, action: Action) -> str:
        actions = self._program[rank]
        place = actions.index(action)
        low, high = max(0, place - NUM_CONTEXT_ACTIONS), place + NUM_CONTEXT_ACTIONS + 1
        words = [f"▸{each}" if each == action else str(each) for each in actions[low:high]]
        return " ".join([*(["…"] if low else []), *words, *(["…"] if high < len(actions) else [])])

    def _waiting_for(self, rank: int, name: str, action: Action) -> str:
        missing = []
        for need in self._dependencies.of(rank, action):
            if need not in self.times:
                there = need.action in self._program.get(need.rank, ())
                missing.append(f"{need.action} of rank {need.rank}" + ("" if there else ", which is in no program"))
        others = self._dependencies.participants(rank, action)
        missing += [f"rank {each} to come to {action} too" for each in others if self.next_action(each, name) != action]
        return ", ".join(missing[:NUM_CONTEXT_ACTIONS]) or "the other ranks of this collective"
