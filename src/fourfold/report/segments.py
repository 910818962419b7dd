"""Attempts: the stretches of a run between its beginning, its resumptions and its end, and the time each took.

attempt  from where a process began, or went on from a checkpoint, to the checkpoint that the next one went on from
Law: attempts tile the run's steps; what was done after an attempt's last checkpoint was done again, and is not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fourfold.report.html_table import UNKNOWN, render_row, render_table
from fourfold.report.progress import format_seconds
from fourfold.words.units import format_si

COLUMNS = ("steps", "time", "a second", "")
NOTE = "Steps after an attempt's last checkpoint were done again; their first time is not counted."


class Segment(NamedTuple):
    """Steps `first` to `last`; `units` are tokens, or samples where there are none."""

    first_step: int
    last_step: int
    seconds: float
    num_units: float


def read_segments(lines: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """The attempts that the lines of a log tell of, at least one."""
    found, begun = [], _SegmentBuilder(0)
    for line in lines:
        if "resumed" in line:
            found.append(begun.build())
            begun = _SegmentBuilder(line["resumed"])
        else:
            begun.add_line(line)
    return [*found, begun.build()]


class _SegmentBuilder:
    """An attempt, line by line."""

    def __init__(self, step: int) -> None:
        self._first = self._last = step
        self._seconds = self._units = 0.0

    def add_line(self, line: Mapping[str, Any]) -> None:
        if "step" in line and "loss" in line:
            self._last = line["step"]
            self._seconds += line["seconds"]
            self._units += line.get("tokens") or line["samples"]
        # Between steps there are evaluations, saves and batches: where the whole time is told, it counts.
        elif "elapsed_seconds" in line:
            self._seconds = line["elapsed_seconds"]
        elif "finished" in line:
            self._seconds = line["seconds"]

    def build(self) -> Segment:
        return Segment(self._first + 1, self._last, self._seconds, self._units)


def segments_card(attempts: Sequence[Segment]) -> str:
    """The table of attempts; nothing where there was one."""
    if len(attempts) == 1:
        return ""
    rows = [render_row(_row_cells(each)) for each in attempts]
    return f'<h2>Time by attempt</h2><p class="note">{NOTE}</p>{render_table(COLUMNS, rows, style="attempts")}'


def _row_cells(attempt: Segment) -> Sequence[str]:
    first, last, seconds, units = attempt
    steps = UNKNOWN if last < first else f"{first:,} to {last:,}" if last > first else f"{first:,}"
    rate = format_si(units / seconds) if units and seconds > 0 else UNKNOWN
    return steps, format_seconds(seconds), rate, f"gone on from step {first - 1:,}" if first > 1 else "begun"
