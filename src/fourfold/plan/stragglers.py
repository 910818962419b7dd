"""Late ranks: those that the others wait for, step after step.

busy  what a rank spends its own time on in a step, in seconds by name; waiting is no part of it
late  busy for more than FACTOR times as long as the others, by their median
Law: a rank is late by its typical step, so one slow step of many makes nobody late.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high

STRAGGLER_FACTOR = 1.5
MIN_EXCESS_SECONDS = 0.002  # below it, it is the system's own unrest


@dataclass(frozen=True)
class Straggler:
    """A rank others wait for: seconds a step that it is busy, and they are; what it is in, and both again there."""

    rank: int
    seconds: float
    others_seconds: float
    place: str
    place_seconds: float
    others_place_seconds: float

    def describe(self, host: str) -> str:
        there = f"{_ms(self.place_seconds)} in {self.place}, they {_ms(self.others_place_seconds)}"
        busy = f"busy for {_ms(self.seconds)} a step, the others for {_ms(self.others_seconds)}"
        return f"rank {self.rank} on {host} is late: {busy}; it is {there}"


def median_step_seconds(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Busy seconds of one rank's typical step: by name, the median over the steps."""
    rows = list(steps)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row.get(name, 0.0) for row in rows) for name in names}


def find_stragglers(busy: Sequence[Mapping[str, float]]) -> list[Straggler]:
    """The late among all ranks, from each one's typical step, in rank order."""
    totals = [sum(row.values()) for row in busy]
    found = []
    for rank, (total, row) in enumerate(zip(totals, busy, strict=True)):
        others = [other for number, other in enumerate(busy) if number != rank]
        if not others:
            continue
        # The higher of two in the middle: at most half of the ranks can be late.
        usual = median_high(sum(other.values()) for other in others)
        if total <= STRAGGLER_FACTOR * usual or total - usual < MIN_EXCESS_SECONDS:
            continue
        there = {name: median(other.get(name, 0.0) for other in others) for name in row}
        place = max(row, key=lambda name: row[name] - there[name])
        found.append(Straggler(rank, total, usual, place, row[place], there[place]))
    return found


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
