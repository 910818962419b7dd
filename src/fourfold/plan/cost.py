"""Cost: what the actions of a program cost, from a trace; and the measured step beside the simulated one.

price  seconds an action takes its lane, waits left out: the median over the sampled steps, per rank
lead   seconds between a bucket's being ready and the end of the backward that it comes from
Law: what was measured and what is simulated join by (rank, action).
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.plan.dependencies import Dependencies
from fourfold.plan.simulate import TimedAction, Timeline, makespan, simulate
from fourfold.plan.trace_file import Event, Trace, waiting_seconds_within
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import LAUNCHED_EVENT, READY_EVENT, RING_SPAN, WAIT_SPAN


@dataclass(frozen=True)
class ActionCosts:
    """Seconds by (rank, action). An action that was never seen costs nothing: a rank alone has nothing to reduce."""

    seconds: Mapping[tuple[int, str], float]
    overlaps: Mapping[tuple[int, str], float]

    def cost(self, rank: int, action: Action) -> float:
        return self.seconds.get((rank, str(action)), 0.0)

    def overlap(self, rank: int, action: Action) -> float:
        return self.overlaps.get((rank, str(action)), 0.0)


class Difference(NamedTuple):
    """An action of a rank, measured and simulated, in seconds; ends are since the step's first action."""

    rank: int
    action: str
    measured: float
    simulated: float
    measured_end: float
    simulated_end: float


def measure_costs(trace: Trace) -> ActionCosts:
    """The median cost of every action of every rank."""
    seconds: dict[tuple[int, str], list[float]] = {}
    leads: dict[tuple[int, str], list[float]] = {}
    needs = Dependencies(trace.program)
    for step in trace.steps:
        by_rank = {rank: trace.events_of(step=step, rank=rank) for rank in trace.ranks}
        starts = _launch_times(by_rank)
        for rank, events in by_rank.items():
            for key, value in action_seconds(events, starts).items():
                seconds.setdefault((rank, key), []).append(value)
            for key, value in _overlaps(needs, rank, trace.program[rank], events).items():
                leads.setdefault((rank, key), []).append(value)
    return ActionCosts(_medians(seconds), _medians(leads))


def _medians(values: Mapping[tuple[int, str], list[float]]) -> dict[tuple[int, str], float]:
    # Of an even number the lower, as `typical_step`: a short run has two, and the first of them is a slow one.
    return {key: statistics.median_low(each) for key, each in values.items()}


def _launch_times(by_rank: Mapping[int, list[Event]]) -> dict[str, float]:
    """When the last rank had sent each bucket."""
    sent: dict[str, float] = {}
    for events in by_rank.values():
        for event in events:
            name, _, what = event.name.partition(" ")
            if what == LAUNCHED_EVENT:
                sent[name] = max(sent.get(name, event.start), event.start)
    return sent


def action_seconds(events: list[Event], sent: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a rank's actions in one step."""
    found: dict[str, float] = {}
    free = 0.0
    for event in sorted(events, key=lambda event: event.start):
        if event.name.startswith(Verb.REDUCE) and " " not in event.name:
            # A reduction that began before the others had sent, or before the one ahead of it had ended, waited.
            begin = max(event.start, sent.get(event.name, event.start), free)
            free = max(free, event.stop)
            found[event.name] = max(0.0, event.stop - begin)
        elif " " not in event.name and event.name not in (WAIT_SPAN, RING_SPAN):
            found[event.name] = event.seconds - waiting_seconds_within(events, event) - _nested_seconds(events, event)
    return found


def _nested_seconds(events: list[Event], within: Event) -> float:
    """Seconds of the actions that were done while a forward or a backward went on: updates that are fused with it."""
    if within.name[0] not in (Verb.FORWARD, Verb.BACKWARD):
        return 0.0
    return sum(
        event.seconds - waiting_seconds_within(events, event)
        for event in events
        if event.name[0] in (Verb.UPDATE, Verb.GATHER) and within.start <= event.start and event.stop <= within.stop
    )


def _overlaps(needs: Dependencies, rank: int, actions: tuple[Action, ...], events: list[Event]) -> dict[str, float]:
    ends = {event.name: event.stop for event in events}
    starts = {event.name: event.start for event in events}
    leads: dict[str, float] = {}
    for action in actions:
        ready = starts.get(f"{action} {READY_EVENT}", starts.get(f"{action} {LAUNCHED_EVENT}"))
        needed = [ends[str(need.action)] for need in needs.of(rank, action) if str(need.action) in ends]
        if ready is not None and needed:
            leads[str(action)] = max(0.0, max(needed) - ready)
    return leads


def measured_timeline(trace: Trace, step: int) -> dict[int, tuple[TimedAction, ...]]:
    """A sampled step's timeline, as `simulate` gives one: seconds since its first action."""
    found: dict[int, list[TimedAction]] = {}
    for rank in trace.ranks:
        by_name = {event.name: event for event in trace.events_of(step=step, rank=rank)}
        here = [(action, by_name[str(action)]) for action in trace.program[rank] if str(action) in by_name]
        found[rank] = [TimedAction(action, event.start, event.stop) for action, event in here]
    begin = min((timed.start for each in found.values() for timed in each), default=0.0)
    return {
        rank: tuple(TimedAction(timed.action, timed.start - begin, timed.end - begin) for timed in each)
        for rank, each in found.items()
    }


def median_step(trace: Trace) -> int:
    """The sampled step of median length."""
    lengths = sorted((makespan(measured_timeline(trace, step)), step) for step in trace.steps)
    return lengths[(len(lengths) - 1) // 2][1]


def simulated_timeline(trace: Trace, step: int | None = None) -> dict[int, tuple[TimedAction, ...]]:
    """One step of the traced program at its measured prices; with `step`, what was run in that one."""
    known = measure_costs(trace)
    program = trace.program if step is None else trace.program_of_step(step)
    return simulate(program, known.cost, overlap=known.overlap)


def compare_timelines(trace: Trace, step: int, timeline: Timeline) -> list[Difference]:
    """A sampled step, action by action, beside a simulated timeline. Durations are without waits."""
    rows = []
    begun = measured_timeline(trace, step)
    by_rank = {rank: trace.events_of(step=step, rank=rank) for rank in trace.ranks}
    sent = _launch_times(by_rank)
    for rank, events in by_rank.items():
        spent = action_seconds(events, sent)
        ends = {str(timed.action): timed.end for timed in begun[rank]}
        for timed in timeline.get(rank, ()):
            name = str(timed.action)
            if name in ends:
                length = timed.end - timed.start
                rows.append(Difference(rank, name, spent[name], length, ends[name], timed.end))
    return rows
