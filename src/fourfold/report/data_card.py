"""Data card: how well the accelerators were used while training waited for its batches.

Law: utilization, samples and bytes a second of a row are of the same steps; steps that were repeated after a restart
count once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fourfold.plan.utilization import Window, add_windows
from fourfold.report.html_table import UNKNOWN, render_row, render_table, render_text
from fourfold.words.units import format_bytes_per_second, format_si

COLUMNS = ("epochs", "steps", "utilization", "samples a second", "bytes read a second", "waited most")
NOTE = (
    "Utilization: the time that is not spent waiting for data ÷ the time of the steps with their waits, as DLIO and "
    "MLPerf Storage define it. All figures of a row are of the same steps: those given, without the first of each "
    "epoch, and without evaluations and checkpoints. A step waits for the rank whose batch comes last."
)


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a run; see `trainer/data_meter.py`. `rank`: the one that waited most, for `rank_seconds`."""

    first_epoch: int
    last_epoch: int
    first_step: int
    last_step: int
    num_steps: int
    num_samples: int
    compute_seconds: float
    running_seconds: float
    rank: int
    host: str
    rank_seconds: float
    bytes_read: int | None = None
    utilization: float | None = None

    @property
    def window(self) -> Window:
        return Window(self.num_steps, self.num_samples, self.compute_seconds, self.running_seconds, self.bytes_read)


def read_data_records(lines: Iterable[Mapping[str, Any]]) -> list[DataRecord]:
    """The segments in the lines of a log, without those that a resumed run has repeated."""
    records: list[DataRecord] = []
    for line in lines:
        if "resumed" in line:
            records = [each for each in records if each.last_step <= line["resumed"]]
        elif "data" in line:
            records.append(msgspec.convert(line["data"], DataRecord))
    return records


def total_window(records: Sequence[DataRecord]) -> Window:
    """The window of a run."""
    return add_windows(record.window for record in records)


def data_card(records: Sequence[DataRecord]) -> str:
    """The card with a row per segment and one for all; "" for a run that has not measured its waits."""
    if not records:
        return ""
    rows = [render_row(_cells(each)) for each in records]
    if len(records) > 1:
        total = total_window(records)
        rows.append(render_row(["all", f"{total.num_steps:,} counted", *_figures(total), UNKNOWN]))
    table = render_table(COLUMNS, rows, style="data-waits")
    return f'<h2>Waiting for data</h2>{table}<p class="note">{render_text(NOTE)}</p>'


def _cells(record: DataRecord) -> list[str]:
    waited = f"rank {record.rank} on {record.host}, {100 * _fraction(record):.1f} % of the time"
    return [
        _range(record.first_epoch + 1, record.last_epoch + 1),
        _range(record.first_step, record.last_step),
        *_figures(record.window),
        waited if record.rank_seconds > 0 else UNKNOWN,
    ]


def _figures(window: Window) -> list[str]:
    rate, num_bytes = window.samples_per_second, window.bytes_per_second
    return [
        format_utilization(window.utilization),
        UNKNOWN if rate is None else format_si(rate),
        UNKNOWN if num_bytes is None else format_bytes_per_second(num_bytes),
    ]


def format_utilization(value: float | None) -> str:
    """97.3 %; a dash where nothing was measured."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def _fraction(record: DataRecord) -> float:
    return record.rank_seconds / record.running_seconds if record.running_seconds > 0 else 0.0


def _range(first: int, last: int) -> str:
    return f"{first:,} to {last:,}" if last > first else f"{first:,}"
