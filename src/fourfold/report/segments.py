"""Segments: a run between its start, its resumptions and its end, and the time of each segment.

segment  from the start, or from a checkpoint, to the checkpoint from which the next segment resumed
Law: segments tile the run's steps. Steps after the last checkpoint of a segment were repeated, and count once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fourfold.report.html_table import UNKNOWN, render_row, render_table
from fourfold.trainer.progress import format_seconds
from fourfold.words.units import format_si

COLUMNS = ("steps", "time", "a second", "")
NOTE = "Steps after a segment's last checkpoint were repeated; their first time is not counted."


class Segment(NamedTuple):
    """Steps `first_step` to `last_step`. `num_units` counts tokens, or samples if there are no tokens."""

    first_step: int
    last_step: int
    seconds: float
    num_units: float


def read_segments(lines: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """The segments in the lines of a log, at least one."""
    segments, builder = [], _SegmentBuilder(0)
    for line in lines:
        if "resumed" in line:
            segments.append(builder.build())
            builder = _SegmentBuilder(line["resumed"])
        else:
            builder.add_line(line)
    return [*segments, builder.build()]


class _SegmentBuilder:
    """A segment, built line by line."""

    def __init__(self, step: int) -> None:
        self._first = self._last = step
        self._seconds = self._units = 0.0

    def add_line(self, line: Mapping[str, Any]) -> None:
        if "step" in line and "loss" in line:
            self._last = line["step"]
            self._seconds += line["seconds"]
            self._units += line.get("tokens") or line["samples"]
        # The sum of the steps leaves out evaluations, saves and batches: the elapsed time, if logged, replaces it.
        elif "elapsed_seconds" in line:
            self._seconds = line["elapsed_seconds"]
        elif "finished" in line:
            self._seconds = line["seconds"]

    def build(self) -> Segment:
        return Segment(self._first + 1, self._last, self._seconds, self._units)


def segments_card(segments: Sequence[Segment]) -> str:
    """The card with the table of segments; "" if there is only one."""
    if len(segments) == 1:
        return ""
    rows = [render_row(_row_cells(each)) for each in segments]
    return f'<h2>Time by segment</h2><p class="note">{NOTE}</p>{render_table(COLUMNS, rows, style="segments")}'


def _row_cells(segment: Segment) -> Sequence[str]:
    first, last, seconds, units = segment
    steps = UNKNOWN if last < first else f"{first:,} to {last:,}" if last > first else f"{first:,}"
    rate = format_si(units / seconds) if units and seconds > 0 else UNKNOWN
    return steps, format_seconds(seconds), rate, f"resumed from step {first - 1:,}" if first > 1 else "started"
