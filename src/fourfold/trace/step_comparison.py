"""Step comparison: a sampled step as measured, and as simulated at measured costs, action by action.

Law: a timeline begins at the step's first action. Measured and simulated times join by (rank, action); durations are
without waits.
"""

from typing import NamedTuple

from fourfold.plan.simulate import TimedAction, Timeline, simulate
from fourfold.trace.cost import StepCosts, step_costs
from fourfold.trace.trace_file import STEP_SPAN, Trace, is_action


class Difference(NamedTuple):
    """An action of a rank, measured and simulated, in seconds; ends are relative to the first action of the step."""

    rank: int
    action: str
    measured: float
    simulated: float
    measured_end: float
    simulated_end: float


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


def measured_seconds(trace: Trace, step: int) -> float:
    """How long a sampled step took: from the first rank that began it to the last that ended it."""
    events = [
        event for event in trace.events if event.step == step and (event.name == STEP_SPAN or is_action(event.name))
    ]
    return max((each.stop for each in events), default=0.0) - min((each.start for each in events), default=0.0)


def median_step(trace: Trace) -> int:
    """The sampled step of median length."""
    lengths = sorted((measured_seconds(trace, step), step) for step in trace.steps)
    return lengths[(len(lengths) - 1) // 2][1]


def simulated_timeline(trace: Trace, costs: StepCosts, step: int | None = None) -> dict[int, tuple[TimedAction, ...]]:
    """Simulate the traced program; with `step`, only the actions that ran in that step."""
    return simulate(
        trace.program if step is None else trace.program_of_step(step),
        costs.cost,
        overlap=costs.overlap,
        mesh=trace.mesh,
        ranks_by_memory=trace.ranks_by_memory,
        begins=costs.begins,
    )


def simulated_seconds(timeline: Timeline, costs: StepCosts) -> float:
    """How long a simulated step takes, with the time before its first action and after its last ones."""
    ends = [
        max((timed.end for timed in actions), default=0.0) + costs.rests.get(rank, 0.0)
        for rank, actions in timeline.items()
    ]
    return costs.before + max(ends, default=0.0)


def simulated_step_seconds(trace: Trace, step: int) -> float:
    """How long a sampled step takes when it is simulated at its own costs."""
    costs = step_costs(trace, step)
    return simulated_seconds(simulated_timeline(trace, costs, step), costs)


def compare_timelines(trace: Trace, step: int, timeline: Timeline) -> list[Difference]:
    """Compare a sampled step with a simulated timeline, action by action. Durations are without waits."""
    measured, costs = measured_timeline(trace, step), step_costs(trace, step)
    rows = []
    for rank in trace.ranks:
        ends = {str(timed.action): timed.end for timed in measured[rank]}
        for timed in timeline.get(rank, ()):
            name = str(timed.action)
            if name in ends:
                simulated = timed.end - timed.start
                rows.append(Difference(rank, name, costs.cost(rank, timed.action), simulated, ends[name], timed.end))
    return rows
