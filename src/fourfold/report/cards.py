"""Cards: what the page of a run shows of its checkpoints, faults, segments, memory and data, from its folder and log.

fault    a line of faults.jsonl in the run's folder (`trainer/fault_log.py`), of this version or a later one
segment  from the start, or from a checkpoint, to the checkpoint from which the next segment resumed
Law: what exists and its size come from the disk, pauses and failures from the log; neither is inferred from the other.
An unknown kind of fault is shown like any other; a line that cannot be read is counted, and hides no other. Segments
tile the run's steps: those after the last checkpoint of a segment were repeated, and count once. What was predicted and
what was measured stand next to each other in one unit; what is unknown is a dash. Utilization, samples and bytes a
second of a row are of the same steps.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fourfold.checkpoint.store import CheckpointStore
from fourfold.plan.decode import DecodeError, check_not_pipe, from_json
from fourfold.report.html_page import UNKNOWN, render_row, render_table, render_text
from fourfold.report.svg import Series
from fourfold.trace.utilization import Window, add_windows
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from fourfold.trainer.progress import format_seconds
from fourfold.words.terminal_text import escape_controls
from fourfold.words.units import format_bytes, format_bytes_per_second, format_si

# ---- checkpoints -----------------------------------------------------------------------------------------------------


FAILED_WARNING = re.compile(r"the checkpoint of step ([0-9]{1,15}) could not be written: ([^;]*)")
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,15})")
KEPT, BEST, DAMAGED, NOT_WRITTEN = "kept", "kept, the best", "damaged, set aside", "not written"
CHECKPOINT_COLUMNS = ("step", "size", "pause", "")


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is on the disk, or that was lost. None means unknown."""

    step: int
    num_bytes: int | None
    pause_seconds: float | None
    status: str
    text: str = ""


class CheckpointHistory(NamedTuple):
    """The pause of every save that was begun, by step; and the checkpoints kept, damaged or not written, by step."""

    pauses: Mapping[int, float]
    checkpoints: Sequence[SavedCheckpoint] = ()

    @property
    def written_steps(self) -> set[int]:
        """The steps of the successful saves, according to the log."""
        return {*self.pauses} - {each.step for each in self.checkpoints if each.status == NOT_WRITTEN}

    @property
    def on_disk(self) -> list[SavedCheckpoint]:
        return [each for each in self.checkpoints if each.status in (KEPT, BEST)]


def read_checkpoints(run_dir: Path, lines: Iterable[Mapping[str, Any]]) -> CheckpointHistory:
    """The checkpoints, from the run's folder and the lines of its log. Raises OSError."""
    pauses: dict[int, float] = {}
    lost: list[SavedCheckpoint] = []
    for line in lines:
        if "pause_seconds" in line:
            pauses[line["step"]] = line["pause_seconds"]
        elif "damaged" in line and (name := CHECKPOINT_NAME.fullmatch(line["checkpoint"])):
            texts = [text.rpartition(f"{line['checkpoint']}/")[2] for text in line["damaged"]]
            lost.append(SavedCheckpoint(int(name[1]), None, None, DAMAGED, "; ".join(texts)))
        elif "warning" in line and (failed := FAILED_WARNING.match(line["warning"])):
            lost.append(SavedCheckpoint(int(failed[1]), None, pauses.get(int(failed[1])), NOT_WRITTEN, failed[2]))
    store = CheckpointStore(run_dir)
    best = store.best_step()
    on_disk = [
        SavedCheckpoint(step, _num_bytes(store.step_dir(step)), pauses.get(step), BEST if step == best else KEPT)
        for step in store.steps()
    ]
    return CheckpointHistory(pauses, sorted([*lost, *on_disk], key=lambda each: each.step))


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def checkpoint_ticks(checkpoints: CheckpointHistory, *, last_step: int) -> Series:
    """A tick for every save, on an axis of steps that ends at `last_step`."""
    steps = checkpoints.written_steps | {each.step for each in checkpoints.on_disk}
    return Series("checkpoint", [(float(step), 0.0) for step in sorted(steps) if step <= last_step], 2, "tick")


def checkpoints_card(checkpoints: CheckpointHistory) -> str:
    """The card: how many checkpoints were saved, how long each paused training, which are kept."""
    pauses, saved = checkpoints
    if not pauses and not saved:
        return '<h2>Checkpoints</h2><p class="note">None was saved.</p>'
    notes = [f"{len(checkpoints.written_steps):,} saved, {len(checkpoints.on_disk)} kept"]
    if pauses:
        typical, longest = statistics.median(pauses.values()), max(pauses.values())
        notes.append(f"pause {format_seconds(typical)} in the median, {format_seconds(longest)} at most")
    table = (
        render_table(CHECKPOINT_COLUMNS, [render_row(_checkpoint_cells(each)) for each in saved], style="saved")
        if saved
        else ""
    )
    return f'<h2>Checkpoints</h2><p class="note">{escape(" · ".join(notes))}</p>{table}'


def _checkpoint_cells(saved: SavedCheckpoint) -> Sequence[str]:
    size = UNKNOWN if saved.num_bytes is None else format_bytes(saved.num_bytes)
    pause = UNKNOWN if saved.pause_seconds is None else format_seconds(saved.pause_seconds)
    return f"{saved.step:,}", size, pause, f"{saved.status}: {saved.text}" if saved.text else saved.status


# ---- faults ----------------------------------------------------------------------------------------------------------


RESTART, SKIPPED = "restart", "skipped step"
MAX_NAME_LENGTH = 14  # letters that fit into a drawing's legend
MAX_NAMED_STEPS = 5
FAULT_COLUMNS = ("when, UTC", "what", "step", "where", "back after", "")


class Faults(NamedTuple):
    """A run's faults in the order of the file, and the number of lines that could not be read."""

    faults: Sequence[Fault] = ()
    num_unreadable: int = 0

    def count(self, kind: str) -> int:
        return sum(fault.kind == kind for fault in self.faults)


def read_faults(folder: Path) -> Faults:
    """The faults of the run in this folder; none if it has no such file. Raises OSError."""
    path = folder / FAULTS_FILE
    if not path.exists():
        return Faults()
    check_not_pipe(path)
    known, num_unreadable = [], 0
    for line in path.read_bytes().splitlines():
        try:
            known.append(from_json(line, Fault))
        except DecodeError:
            num_unreadable += bool(line.strip())
    return Faults(known, num_unreadable)


def fault_marks(faults: Sequence[Fault], *, last_step: int) -> list[Series]:
    """Marks for an axis of steps that ends at `last_step`: restarts as rules, all others as pegs."""
    in_range = [fault for fault in faults if 0 <= fault.step <= last_step]
    restarts = [(float(fault.step), 0.0) for fault in in_range if fault.kind == RESTART]
    others = [(float(fault.step), 0.0) for fault in in_range if fault.kind != RESTART]
    kinds = {fault.kind for fault in in_range if fault.kind != RESTART}
    name = escape_controls(kinds.pop()) if len(kinds) == 1 else "other fault"
    name = name if len(name) <= MAX_NAME_LENGTH else "other fault"
    return [Series(RESTART, restarts, 3, "rule"), Series(name, others, 3, "peg")]


def faults_card(faults: Faults, resumed: Sequence[int]) -> str:
    """The card with the table of faults; "" if there were none."""
    known, num_unreadable = faults
    if not known and not num_unreadable:
        return ""
    counts = Counter(fault.kind for fault in known)
    notes = [
        f"{escape_controls(kind)} × {count}" if count > 1 else escape_controls(kind) for kind, count in counts.items()
    ]
    lost = [fault.seconds for fault in known if fault.seconds is not None and math.isfinite(fault.seconds)]
    if lost:
        notes.append(f"{format_seconds(sum(lost))} in total until training continued")
    if resumed:
        notes.append(_resumed_note(resumed))
    if num_unreadable:
        notes.append(
            f"{num_unreadable} {'line' if num_unreadable == 1 else 'lines'} of {FAULTS_FILE} could not be read"
        )
    rows = [render_row(_fault_cells(fault)) for fault in sorted(known, key=lambda fault: fault.time)]
    table = render_table(FAULT_COLUMNS, rows, style="faults") if rows else ""
    return f'<h2>Faults and restarts</h2><p class="note">{escape(" · ".join(notes))}</p>{table}'


def no_faults_note(faults: Faults, resumed: Sequence[int]) -> str:
    """The note under the loss where there is no table of faults."""
    if faults.faults or faults.num_unreadable:
        return ""
    return f"No faults; {_resumed_note(resumed)}." if resumed else "No faults, no restarts."


def _resumed_note(steps: Sequence[int]) -> str:
    if len(steps) > MAX_NAMED_STEPS:
        return f"resumed from a checkpoint {len(steps):,} times"
    return f"resumed from step {', '.join(f'{step:,}' for step in steps)}"


def _fault_cells(fault: Fault) -> Sequence[str]:
    where = [f"rank {fault.rank}"] if fault.rank is not None else []
    where += [fault.host] if fault.host else []
    recovery = UNKNOWN if fault.seconds is None or not math.isfinite(fault.seconds) else format_seconds(fault.seconds)
    step = f"{fault.step:,}" if fault.step >= 0 else UNKNOWN
    return _format_time(fault.time), fault.kind, step, ", ".join(where) or UNKNOWN, recovery, fault.text


def _format_time(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%-d %b %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a time outside the calendar
        return UNKNOWN


# ---- segments --------------------------------------------------------------------------------------------------------


SEGMENT_COLUMNS = ("steps", "time", "a second", "")
SEGMENT_NOTE = "Steps after a segment's last checkpoint were repeated; their first time is not counted."


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
    rows = [render_row(_segment_cells(each)) for each in segments]
    table = render_table(SEGMENT_COLUMNS, rows, style="segments")
    return f'<h2>Time by segment</h2><p class="note">{SEGMENT_NOTE}</p>{table}'


def _segment_cells(segment: Segment) -> Sequence[str]:
    first, last, seconds, units = segment
    steps = UNKNOWN if last < first else f"{first:,} to {last:,}" if last > first else f"{first:,}"
    rate = format_si(units / seconds) if units and seconds > 0 else UNKNOWN
    return steps, format_seconds(seconds), rate, f"resumed from step {first - 1:,}" if first > 1 else "started"


# ---- memory ----------------------------------------------------------------------------------------------------------


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank; see `trainer/memory_log.py`."""

    kept_bytes: float
    peak_bytes: float | None = None
    before_bytes: float | None = None
    device_bytes: float | None = None


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of all ranks after a step. `predicted`: bytes of a rank by kind, None if it is not known."""

    step: int
    ranks: Sequence[RankMemory]
    predicted: dict[str, float] | None = None

    @property
    def largest_peak_bytes(self) -> float | None:
        """The peak of the rank that needs most: on its GPU, or else in the host's memory."""
        on_device = [rank.device_bytes for rank in self.ranks if rank.device_bytes is not None]
        resident = [rank.peak_bytes for rank in self.ranks if rank.peak_bytes is not None]
        return max(on_device or resident, default=None)


def memory_card(memory: MemoryRecord | None) -> str:
    """The card with a row per rank; "" if a run of an older version has not measured its memory."""
    if memory is None:
        return ""
    has_device = any(rank.device_bytes is not None for rank in memory.ranks)
    columns = ["", "predicted", "kept", *(["peak on the GPU"] if has_device else []), "peak", "before the model"]
    predicted = sum(memory.predicted.values()) if memory.predicted is not None else None
    rows = []
    for number, rank in enumerate(memory.ranks):
        measured = [rank.kept_bytes, *([rank.device_bytes] if has_device else []), rank.peak_bytes, rank.before_bytes]
        rows.append(render_row([f"rank {number}", *map(_memory_text, [predicted, *measured])]))
    kinds = " + ".join(f"{name} {format_bytes(num)}" for name, num in (memory.predicted or {}).items())
    notes = [
        f"Measured after step {memory.step:,}.",
        f"Predicted from the plan: {kinds}." if kinds else "",
        "Kept: the same as allocated, plus communication and checkpoint buffers; shared memory counts for the rank "
        "that allocated it. Peak: the largest resident set of the process, including libraries and activations.",
    ]
    note = f'<p class="note">{render_text(" ".join(filter(None, notes)))}</p>'
    return f"<h2>Memory of each rank</h2>{render_table(columns, rows, style='memory')}{note}"


def _memory_text(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)


# ---- data ------------------------------------------------------------------------------------------------------------


DATA_COLUMNS = ("epochs", "steps", "utilization", "samples a second", "bytes read a second", "waited most")
DATA_NOTE = (
    "Utilization: the time that is not spent waiting for data ÷ the time of the steps with their waits, as DLIO and "
    "MLPerf Storage define it. All figures of a row are of the same steps: those given, without the first of each "
    "epoch, and without evaluations and checkpoints. A step waits for the rank whose batch comes last."
)


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a run; see `trainer/meters.py`. `rank`: the one that waited most, for `rank_seconds`."""

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
    rows = [render_row(_data_cells(each)) for each in records]
    if len(records) > 1:
        total = total_window(records)
        rows.append(render_row(["all", f"{total.num_steps:,} counted", *_figures(total), UNKNOWN]))
    table = render_table(DATA_COLUMNS, rows, style="data-waits")
    return f'<h2>Waiting for data</h2>{table}<p class="note">{render_text(DATA_NOTE)}</p>'


def _data_cells(record: DataRecord) -> list[str]:
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
