"""Cost: what the actions of a program cost, from a trace, and the comparison of a measured step with a simulated one.

cost     seconds that an action occupies its lane, without waits: the median over the sampled steps, per rank
overlap  seconds from when a bucket is ready to the end of the backward that fills it; seconds that a forward or
         backward has computed when weights that it uses later arrive
Law: measured and simulated times join by (rank, action).
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fourfold.plan.dependencies import Dependencies, Dependency
from fourfold.plan.simulate import TimedAction, Timeline, makespan, simulate
from fourfold.plan.trace_file import Event, Trace, waiting_seconds_within
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import LAUNCHED_EVENT, READY_EVENT, RING_SPAN, WAIT_SPAN

Key = TypeVar("Key")


@dataclass(frozen=True)
class ActionCosts:
    """Seconds by (rank, action). An action without events costs nothing, for instance a reduction of a single rank."""

    seconds: Mapping[tuple[int, str], float]
    overlaps: Mapping[tuple[int, str, str], float]
    """By (rank, action, what it depends on)."""

    def cost(self, rank: int, action: Action) -> float:
        return self.seconds.get((rank, str(action)), 0.0)

    def overlap(self, rank: int, action: Action, needed: Dependency) -> float:
        return self.overlaps.get((rank, str(action), str(needed.action)), 0.0)


class Difference(NamedTuple):
    """An action of a rank, measured and simulated, in seconds; ends are relative to the start of the step."""

    rank: int
    action: str
    measured: float
    simulated: float
    measured_end: float
    simulated_end: float


def measure_costs(trace: Trace) -> ActionCosts:
    """The median cost of every action of every rank."""
    seconds: dict[tuple[int, str], list[float]] = {}
    overlaps: dict[tuple[int, str, str], list[float]] = {}
    dependencies = Dependencies(trace.program, trace.mesh)
    for step in trace.steps:
        by_rank = {rank: trace.events_of(step=step, rank=rank) for rank in trace.ranks}
        launched = _launch_times(by_rank)
        for rank, events in by_rank.items():
            for key, value in action_seconds(events, launched).items():
                seconds.setdefault((rank, key), []).append(value)
            for (action, needed), value in _overlaps(dependencies, rank, trace.program[rank], events).items():
                overlaps.setdefault((rank, action, needed), []).append(value)
    return ActionCosts(_medians(seconds), _medians(overlaps))


def _medians(values: Mapping[Key, list[float]]) -> dict[Key, float]:
    # The lower of two middle values, as in `median_step`: a short run has two sampled steps, and the first is slow.
    return {key: statistics.median_low(each) for key, each in values.items()}


def _launch_times(by_rank: Mapping[int, list[Event]]) -> dict[str, float]:
    """By reduction and unshard: when the last rank launched it."""
    launched: dict[str, float] = {}
    for events in by_rank.values():
        for event in events:
            name, _, what = event.name.partition(" ")
            if what == LAUNCHED_EVENT or event.name.startswith(Verb.UNSHARD):
                launched[name] = max(launched.get(name, event.start), event.start)
    return launched


def action_seconds(events: list[Event], launched: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a rank's actions in one step, by name, without waits.

    `launched`: by reduction and unshard, when the last rank launched it.
    """
    seconds: dict[str, float] = {}
    free = 0.0  # when the reduction or unshard before ended
    for event in sorted(events, key=lambda event: event.start):
        if event.name.startswith((Verb.REDUCE, Verb.UNSHARD)) and " " not in event.name:
            # It waits until every rank has launched it, and until the one ahead of it has ended.
            start = max(event.start, launched.get(event.name, event.start), free)
            free = max(free, event.stop)
            seconds[event.name] = max(0.0, event.stop - start)
        elif " " not in event.name and event.name not in (WAIT_SPAN, RING_SPAN):
            seconds[event.name] = event.seconds - waiting_seconds_within(events, event) - _nested_seconds(events, event)
    return seconds


def _nested_seconds(events: list[Event], within: Event) -> float:
    """Seconds of the updates and gathers that ran inside a forward or backward, because they are fused into it."""
    if within.name[0] not in (Verb.FORWARD, Verb.BACKWARD):
        return 0.0
    return sum(
        event.seconds - waiting_seconds_within(events, event)
        for event in events
        if event.name[0] in (Verb.UPDATE, Verb.GATHER) and within.start <= event.start and event.stop <= within.stop
    )


def _overlaps(
    dependencies: Dependencies, rank: int, actions: tuple[Action, ...], events: list[Event]
) -> dict[tuple[str, str], float]:
    """By action and what it depends on: how long before the end of that it could begin, or has begun."""
    by_name = {event.name: event for event in events}
    overlaps: dict[tuple[str, str], float] = {}
    for action in actions:
        name = str(action)
        ready = by_name.get(f"{name} {READY_EVENT}", by_name.get(f"{name} {LAUNCHED_EVENT}"))
        if action.verb == Verb.UNSHARD:
            ready = by_name.get(name)
        for needed in dependencies.of(rank, action):
            ended = by_name.get(str(needed.action))
            if ended is None or needed.rank != rank:
                continue
            if needed.action.verb == Verb.UNSHARD and name in by_name:
                overlaps[name, str(needed.action)] = _seconds_computed(events, by_name[name], until=ended.stop)
            elif ready is not None:
                overlaps[name, str(needed.action)] = max(0.0, ended.stop - ready.start)
    return overlaps


def _seconds_computed(events: list[Event], within: Event, *, until: float) -> float:
    """Seconds that an action has run until then, without waits and without what is fused into it."""
    part = within._replace(stop=max(within.start, min(within.stop, until)))
    return part.seconds - waiting_seconds_within(events, part) - _nested_seconds(events, part)


def measured_timeline(trace: Trace, step: int) -> dict[int, tuple[TimedAction, ...]]:
    """The timeline of a sampled step, like those of `simulate`: seconds since its first action."""
    measured: dict[int, list[TimedAction]] = {}
    for rank in trace.ranks:
        by_name = {event.name: event for event in trace.events_of(step=step, rank=rank)}
        here = [(action, by_name[str(action)]) for action in trace.program[rank] if str(action) in by_name]
        measured[rank] = [TimedAction(action, event.start, event.stop) for action, event in here]
    begin = min((timed.start for each in measured.values() for timed in each), default=0.0)
    return {
        rank: tuple(TimedAction(timed.action, timed.start - begin, timed.end - begin) for timed in each)
        for rank, each in measured.items()
    }


def median_step(trace: Trace) -> int:
    """The sampled step of median length."""
    lengths = sorted((makespan(measured_timeline(trace, step)), step) for step in trace.steps)
    return lengths[(len(lengths) - 1) // 2][1]


def simulated_timeline(trace: Trace, step: int | None = None) -> dict[int, tuple[TimedAction, ...]]:
    """Simulate the traced program with its measured costs; with `step`, only the actions that ran in that step."""
    costs = measure_costs(trace)
    program = trace.program if step is None else trace.program_of_step(step)
    return simulate(program, costs.cost, overlap=costs.overlap, mesh=trace.mesh)


def compare_timelines(trace: Trace, step: int, timeline: Timeline) -> list[Difference]:
    """Compare a sampled step with a simulated timeline, action by action. Durations are without waits."""
    rows = []
    measured = measured_timeline(trace, step)
    by_rank = {rank: trace.events_of(step=step, rank=rank) for rank in trace.ranks}
    launched = _launch_times(by_rank)
    for rank, events in by_rank.items():
        seconds = action_seconds(events, launched)
        ends = {str(timed.action): timed.end for timed in measured[rank]}
        for timed in timeline.get(rank, ()):
            name = str(timed.action)
            if name in ends:
                simulated = timed.end - timed.start
                rows.append(Difference(rank, name, seconds[name], simulated, ends[name], timed.end))
    return rows
