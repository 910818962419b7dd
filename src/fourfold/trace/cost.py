"""Cost: what the actions of a program cost, from a trace.

cost     seconds that an action occupies its lane: of a compute action, from the end of the one before it on its rank;
         of a collective, from its launch on the last rank. Waits are taken out
wait     a rank's time until what it waits for has arrived; a delay until it resumes is its own time
overlap  seconds from when a bucket is launched to the end of the backward that fills it; seconds that a forward or
         backward has computed when weights that it uses later arrive
rest     seconds from a rank's last action to the end of its step
Law: simulated at its own costs, a step takes as long as it did, if programs and dependencies are what ran.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fourfold.plan.dependencies import Dependencies, Dependency
from fourfold.plan.rank_program import lane_of
from fourfold.trace.trace_file import COLLECTIVE_LANES, HOLDING_VERBS, STEP_SPAN, Interval, RankEvents, Trace
from fourfold.words.program import Action
from fourfold.words.trace_events import COMPUTE_LANE, GATHER_LANE, LAUNCHED_EVENT

Key = TypeVar("Key")


@dataclass(frozen=True)
class StepCosts:
    """Seconds by (rank, action). An action without events costs nothing, for instance a reduction of a single rank.

    before  from the first rank's begin of the step to the first action of any rank
    begins  by rank: from there to its own first action
    rests   by rank
    """

    seconds: Mapping[tuple[int, str], float]
    overlaps: Mapping[tuple[int, str, str], float]
    """By (rank, action, what it depends on)."""
    before: float = 0.0
    begins: Mapping[int, float] = field(default_factory=dict)
    rests: Mapping[int, float] = field(default_factory=dict)

    def cost(self, rank: int, action: Action) -> float:
        return self.seconds.get((rank, str(action)), 0.0)

    def overlap(self, rank: int, action: Action, needed: Dependency) -> float:
        return self.overlaps.get((rank, str(action), str(needed.action)), 0.0)


def measure_costs(trace: Trace) -> StepCosts:
    """The median costs over the sampled steps."""
    steps = [step_costs(trace, step) for step in trace.steps]
    return StepCosts(
        _medians(each.seconds for each in steps),
        _medians(each.overlaps for each in steps),
        _median([each.before for each in steps] or [0.0]),
        _medians(each.begins for each in steps),
        _medians(each.rests for each in steps),
    )


def _median(values: Sequence[float]) -> float:
    # The lower of two middle values, as in `median_step`: a short run has two sampled steps, and the first is slow.
    return statistics.median_low(values)


def _medians(mappings: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    by_key: dict[Key, list[float]] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            by_key.setdefault(key, []).append(value)
    return {key: _median(values) for key, values in by_key.items()}


def step_costs(trace: Trace, step: int) -> StepCosts:
    """The costs of one sampled step."""
    sampled = _SampledStep(trace, step)
    seconds, overlaps = dict[tuple[int, str], float](), dict[tuple[int, str, str], float]()
    for rank, events in sampled.by_rank.items():
        seconds |= {(rank, name): value for name, value in sampled.collective_seconds(rank)}
        for action in sampled.program[rank]:
            name = str(action)
            if name in events.by_name and lane_of(action) not in COLLECTIVE_LANES:
                seconds[rank, name] = sampled.compute_seconds(rank, action)
            for needed in sampled.dependencies.of(rank, action):
                if needed.rank == rank and (overlap := sampled.overlap(rank, action, needed.action)) is not None:
                    overlaps[rank, name, str(needed.action)] = overlap
    firsts = {rank: events.first for rank, events in sampled.by_rank.items() if events.actions}
    first = min(firsts.values(), default=0.0)
    start = min((events.start for events in sampled.by_rank.values()), default=first)
    begins = {rank: value - first for rank, value in firsts.items()}
    return StepCosts(seconds, overlaps, first - start, begins, {rank: sampled.rest(rank) for rank in firsts})


class _SampledStep:
    """One sampled step, on all ranks."""

    def __init__(self, trace: Trace, step: int) -> None:
        self.program = trace.program
        self.dependencies = Dependencies(trace.program, trace.mesh, trace.ranks_by_memory)
        self.by_rank = {rank: RankEvents(trace.events_of(step=step, rank=rank)) for rank in trace.ranks}

    def collective_seconds(self, rank: int) -> Iterator[tuple[str, float]]:
        """A rank's reductions, gathers and unshards, by name: each waits for its launch on all ranks, and for the one
        ahead of it on its lane.
        """
        free = dict.fromkeys(COLLECTIVE_LANES, 0.0)
        for event in sorted(self.by_rank[rank].actions, key=lambda event: event.start):
            if event.lane in free:
                start = max(event.start, self._last_launch(event.name), free[event.lane])
                free[event.lane] = max(free[event.lane], event.stop)
                yield event.name, max(0.0, event.stop - start)

    def _last_launch(self, name: str) -> float:
        return max(
            events.by_name[launch].start
            for events in self.by_rank.values()
            for launch in (f"{name} {LAUNCHED_EVENT}", name)
            if launch in events.by_name
        )

    def compute_seconds(self, rank: int, action: Action) -> float:
        """An action of the process itself, without what is fused into it."""
        events, name = self.by_rank[rank], str(action)
        within = events.interval_of(name)
        return events.busy_seconds(within, self._moments(rank, action), events.nested_updates(name, within))

    def _moments(self, rank: int, action: Action) -> list[float]:
        """When what an action waits for was there."""
        moments = [self._end(needed) for needed in self.dependencies.of(rank, action)]
        peers = self.dependencies.ends_with(rank, action)
        if len(peers) > 1:
            moments.append(max(self._arrival(peer, str(action)) for peer in peers))
        found = [each for each in moments if each is not None]
        # A forward or backward waits for one thing after another, any other action for all at once.
        return found if action.verb in HOLDING_VERBS else [max(found)] if found else []

    def _end(self, needed: Dependency) -> float | None:
        """When an action had ended on all ranks that begin it together."""
        ranks = self.dependencies.participants(*needed)
        names = [(self.by_rank[each].by_name, str(needed.action)) for each in ranks]
        return max((by_name[name].stop for by_name, name in names if name in by_name), default=None)

    def _arrival(self, rank: int, name: str) -> float:
        """When a rank had done its part of an action that ranks end together: its last wait is for the others."""
        events = self.by_rank[rank]
        if name not in events.by_name:
            return 0.0
        event = events.by_name[name]
        waits = [wait.start for wait in events.waits if event.start <= wait.start and wait.stop <= event.stop]
        return max(waits, default=event.stop)

    def overlap(self, rank: int, action: Action, needed: Action) -> float | None:
        """How long before the end of what it needs an action could begin, or has begun; None if that is not known."""
        events, name, other = self.by_rank[rank], str(action), str(needed)
        if other not in events.by_name:
            return None
        if lane_of(needed) == GATHER_LANE and name in events.by_name and action.verb in HOLDING_VERBS:
            begin, end = events.interval_of(name)
            return self._busy_seconds(rank, action, Interval(begin, max(begin, min(end, events.by_name[other].stop))))
        launch = events.by_name.get(f"{name} {LAUNCHED_EVENT}", events.by_name.get(name))
        if lane_of(action) in COLLECTIVE_LANES and lane_of(needed) == COMPUTE_LANE and launch is not None:
            begin, end = events.interval_of(other)
            return self._busy_seconds(rank, needed, Interval(min(end, max(begin, launch.start)), end))
        return None

    def _busy_seconds(self, rank: int, action: Action, part: Interval) -> float:
        """Seconds of a part of an action, without waits and without what is fused into it."""
        events = self.by_rank[rank]
        return events.busy_seconds(part, self._moments(rank, action), events.nested_updates(str(action), part))

    def rest(self, rank: int) -> float:
        """Seconds from a rank's last action to the end of its step: it waits for its collectives."""
        events = self.by_rank[rank]
        if STEP_SPAN not in events.by_name:
            return 0.0
        last = max(each.stop for each in events.actions if each.lane not in COLLECTIVE_LANES)
        collectives = [a for a in self.program[rank] if lane_of(a) in COLLECTIVE_LANES]
        moments = [self._end(Dependency(rank, action)) for action in collectives]
        within = Interval(last, max(last, events.by_name[STEP_SPAN].stop))
        return events.busy_seconds(within, [each for each in moments if each is not None])
