"""Rank events: what one rank recorded in one step, and how long it was busy.

wait    a rank's time until what it waits for has arrived; a delay until it resumes is its own time
nested  an update that ran inside a forward or backward, because it is fused into it
Law: every second of a rank's own time belongs to one action, or lies before its first or after its last one.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from fourfold.trace.trace_file import STEP_SPAN, Event, is_action, merged_waits
from fourfold.words.program import Verb
from fourfold.words.trace_events import COMPUTE_LANE, GATHER_LANE, REDUCE_LANE

COLLECTIVE_LANES: tuple[str, ...] = (REDUCE_LANE, GATHER_LANE)
HOLDING_VERBS = (Verb.FORWARD, Verb.BACKWARD)


class Interval(NamedTuple):
    start: float
    stop: float


class RankEvents:
    """What one rank recorded in one step."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.by_name = {event.name: event for event in events}
        self.waits = merged_waits(list(events))
        self.actions = [event for event in events if is_action(event.name)]
        self.updates = [event for event in self.actions if event.name[0] == Verb.UPDATE]

    @cached_property
    def in_order(self) -> list[Event]:
        """The actions of the compute lane that run inside no other, in the order in which they ended."""
        own = sorted((each for each in self.actions if each.lane == COMPUTE_LANE), key=lambda each: each.stop)
        holding = [each for each in own if each.name[0] in HOLDING_VERBS]
        return [each for each in own if not any(_is_inside(each, other) for other in holding)]

    @property
    def first(self) -> float:
        """When the first action began."""
        return min(event.start for event in self.actions)

    @property
    def start(self) -> float:
        """When the step began."""
        return self.by_name[STEP_SPAN].start if STEP_SPAN in self.by_name else self.first

    def interval_of(self, name: str) -> Interval:
        """An action of the process itself, from the end of the one before it."""
        event = self.by_name[name]
        before = [each.stop for each in self.in_order if each.stop <= event.start] if event in self.in_order else []
        return Interval(max(before, default=event.start), event.stop)

    def nested_updates(self, name: str, within: Interval) -> Iterator[Event]:
        """The updates that ran inside an action, because they are fused into it."""
        if name[0] in HOLDING_VERBS:
            yield from (each for each in self.updates if within.start <= each.start and each.stop <= within.stop)

    def busy_seconds(self, within: Interval, moments: Iterable[float] = (), updates: Iterable[Event] = ()) -> float:
        """Seconds of an interval, less waits and `updates`. A wait ends at the last of the `moments` in it, if any."""
        seconds = within.stop - within.start - self._waited(within, moments)
        return seconds - sum(each.seconds - self._waited(Interval(each.start, each.stop), moments) for each in updates)

    def _waited(self, within: Interval, moments: Iterable[float]) -> float:
        total = 0.0
        for wait in self.waits:
            start, stop = max(wait.start, within.start), min(wait.stop, within.stop)
            if start < stop:
                total += max((each for each in moments if start <= each <= stop), default=stop) - start
        return total


def _is_inside(event: Event, other: Event) -> bool:
    return event is not other and other.start <= event.start and event.stop <= other.stop
