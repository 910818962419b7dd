"""Live run: a run's folder as the live page shows it, read again where it has changed.

quiet    since when the log has not grown
limit    how long a run may be quiet, as for the launcher's hang detection: a factor of its median step
part     a piece of the page under a name: HTML, all text of the run escaped
version  of the parts; changes when any of them may have changed
Law: a folder in any state gives a page: one that does not exist yet, that is being written, or that cannot be read. The
lines of the log are always those that reading the whole file would give: what was read is read again only where the
file was cut off, as by a run that resumes, or replaced; a line without its end is left for later. A run is called
stopped only if no process here has its lock and its log is quiet for longer than the limit: the process may be one of
another host. Asking for the lock takes none: the process that is about to take it is not refused.
"""

import os
import secrets
import statistics
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fourfold.plan.decode import DecodeError, check_not_pipe
from fourfold.report import cards, charts
from fourfold.report.html_page import render_card, render_table_of_values, render_text
from fourfold.report.page import describe_run, render_figures
from fourfold.report.run_record import ReportError, RunRecord, make_record, read_description, read_line
from fourfold.trainer.fault_log import FAULTS_FILE
from fourfold.trainer.heartbeat import FIRST_SECONDS, LIMIT_FACTOR, MAX_SAMPLES, PAUSE_SECONDS
from fourfold.trainer.progress import format_duration, format_seconds
from fourfold.words.errors import os_error_text
from fourfold.words.run_files import LOG_FILE, PLAN_FILE, SETTINGS_FILE

# ---- the log, as it grows --------------------------------------------------------------------------------------------


CHUNK_BYTES = 2**22
MARK_BYTES = 512  # more than a line of a step


class _Position(NamedTuple):
    """Where the next line begins: in which file, after how many bytes, and what the last of them were."""

    inode: int = 0
    offset: int = 0
    mark: bytes = b""


class LogTail:
    """Follows a log. `lines` are those read so far; `num_unreadable` counts lines that were none of a log."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, _Position()
        self.lines: list[dict[str, Any]] = []
        self.num_unreadable = 0

    def read(self) -> bool:
        """Read what was appended; returns whether anything has changed. A file that is missing is empty.

        Raises OSError.
        """
        check_not_pipe(self._path)
        try:
            file = self._path.open("rb", buffering=0)
        except FileNotFoundError:
            return self._forget()
        with file:
            changed = not self._continues(file.fileno()) and self._forget()
            while chunk := self._read_chunk(file.fileno()):
                changed |= self._add(file.fileno(), chunk)
        return changed

    def _continues(self, fd: int) -> bool:
        """Whether the file still begins with what was read."""
        inode, offset, mark = self._position
        return inode == os.fstat(fd).st_ino and os.pread(fd, len(mark), offset - len(mark)) == mark

    def _forget(self) -> bool:
        had_lines = bool(self.lines or self.num_unreadable)
        self._position, self.lines, self.num_unreadable = _Position(), [], 0
        return had_lines

    def _read_chunk(self, fd: int) -> bytes:
        """Whole lines from the present position; b"" if there are none."""
        chunk = b""
        while more := os.pread(fd, CHUNK_BYTES, self._position.offset + len(chunk)):
            chunk += more
            if end := chunk.rfind(b"\n") + 1:
                return chunk[:end]
        return b""

    def _add(self, fd: int, chunk: bytes) -> bool:
        offset, mark = self._position.offset + len(chunk), (self._position.mark + chunk)[-MARK_BYTES:]
        self._position = _Position(os.fstat(fd).st_ino, offset, mark)
        for line in filter(None, chunk.split(b"\n")):
            try:
                self.lines.append(read_line(line))
            except DecodeError:
                self.num_unreadable += 1
        return True


# ---- whether a process has it locked ---------------------------------------------------------------------------------


PROC_LOCKS = Path("/proc/locks")


def is_locked(path: Path) -> bool | None:
    """Whether a process has locked the file with `flock`; None if the system does not say. Raises OSError.

    Locks of other machines, on a shared file system, are not seen.
    """
    inode = str(path.stat().st_ino)
    try:
        lines = PROC_LOCKS.read_text().splitlines()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 703 08:01:1234 0 EOF". The device is not compared: on btrfs and overlays it is not the
    # file's. A line with an arrow is a process that waits for the lock.
    fields = (line.split() for line in lines)
    return any(
        len(each) > 5 and each[1] == "FLOCK" and each[3] == "WRITE" and each[5].rpartition(":")[2] == inode
        for each in fields
    )


# ---- what the run does -----------------------------------------------------------------------------------------------


State = Literal["waiting", "starting", "running", "quiet", "stalled", "stopped", "finished"]

MIN_LIMIT_SECONDS = 10.0  # as the default of hang_seconds
RECENT_STEPS = 20


class Status(NamedTuple):
    """What a run does; `remaining_seconds` is None unless it runs."""

    state: State
    text: str
    step: int = 0
    num_steps: int = 0
    remaining_seconds: float | None = None


def judge_status(record: RunRecord, *, is_locked: bool | None, quiet_seconds: float) -> Status:
    """The status of a run. `is_locked`: whether a process of this host trains it; None if the system does not say."""
    step, num_steps = (record.steps[-1]["step"] if record.steps else 0), record.last_step
    if record.finish_line is not None:
        return Status("finished", f"finished: {record.finish_line['finished']:,} steps", step, num_steps)
    limit = limit_seconds(record)
    quiet, state = format_duration(quiet_seconds), _state(record, is_locked, quiet_seconds, limit)
    typical = f"a step takes {format_seconds(_median_seconds(record))}" if record.steps else ""
    texts = {
        "starting": f"starting: no step yet, {quiet}",
        "running": "running",
        "quiet": f"no step for {quiet}, {typical}; an evaluation or a checkpoint may take this long",
        "stalled": f"stalled: nothing for {quiet}; {typical or 'no step has ended'}",
        "stopped": f"stopped: no process of this host trains it, and its log has not grown for {quiet}",
    }
    remaining = _remaining_seconds(record, num_steps - step) if state in ("running", "quiet") else None
    return Status(state, texts[state], step, num_steps, remaining)


def limit_seconds(record: RunRecord) -> float:
    """How long the log may be quiet until something else than a step takes the time."""
    if not record.steps:
        return FIRST_SECONDS
    return max(MIN_LIMIT_SECONDS, LIMIT_FACTOR * _median_seconds(record))


def _state(record: RunRecord, is_locked: bool | None, quiet: float, limit: float) -> State:
    if not is_locked and quiet > (limit if record.steps else MIN_LIMIT_SECONDS):
        return "stopped"
    if not record.steps:
        return "starting" if quiet <= limit else "stalled"
    return "running" if quiet <= limit else "quiet" if quiet <= max(limit, PAUSE_SECONDS) else "stalled"


def _median_seconds(record: RunRecord) -> float:
    return statistics.median(line["seconds"] for line in record.steps[-MAX_SAMPLES:])


def _remaining_seconds(record: RunRecord, num_steps: int) -> float:
    """The time of the steps that are left, with evaluations and saves in the share that they had so far."""
    recent = record.steps[-RECENT_STEPS:]
    mean = sum(line["seconds"] for line in recent) / max(len(recent), 1)
    in_steps = sum(line["seconds"] for line in record.steps)
    # Until the first checkpoint the log has no time but that of the steps.
    share = max(1.0, record.total_seconds / in_steps) if in_steps else 1.0
    return mean * share * max(num_steps, 0)


# ---- the run ---------------------------------------------------------------------------------------------------------


WATCHED_FILES = (SETTINGS_FILE, PLAN_FILE, FAULTS_FILE, "checkpoints")


class View(NamedTuple):
    """What the page shows at a moment. `status` is HTML; `parts` is empty if the reader has this version."""

    version: str
    state: str
    subtitle: str
    status: str
    parts: Mapping[str, str]


class LiveRun:
    """Follows the folder of a run. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name
        self._lock = threading.Lock()
        self._tail = LogTail(path / LOG_FILE)
        self._stamps: tuple[Any, ...] = ()
        self._prefix, self._number = secrets.token_hex(4), 0
        self._record: RunRecord | None = None
        self._parts: dict[str, str] = {}
        self._subtitle = ""
        self._grown_at = time.monotonic()

    def view(self, since: str = "") -> View:
        """The run as it is now; without parts if the reader has version `since`."""
        with self._lock:
            try:
                self._update()
                status = self._status()
            except (OSError, ReportError) as error:
                text = os_error_text(error) if isinstance(error, OSError) else str(error)
                status = Status("waiting", f"{self.path} cannot be read: {text}")
            version = f"{self._prefix}-{self._number}"
            parts = {} if since == version else dict(self._parts)
            return View(version, status.state, self._subtitle, _render_status(status), parts)

    def _update(self) -> None:
        had_record = self._record is not None
        has_grown = self._tail.read()
        stamps = tuple(map(self._stamp, WATCHED_FILES))
        if has_grown or not had_record:
            self._grown_at = self._log_time()
        if not has_grown and stamps == self._stamps:
            return
        # First: if reading fails, the next view tries again.
        self._stamps, self._record, self._parts, self._subtitle = (), None, {}, ""
        self._number += 1
        if all((self.path / name).is_file() for name in (SETTINGS_FILE, PLAN_FILE)):
            settings, plan = read_description(self.path)
            self._record = make_record(self.path, settings, plan, self._tail.lines)
            self._subtitle = describe_run(self._record, is_open=False)
            self._parts = _render_parts(self._record, self._tail.num_unreadable)
        self._stamps = stamps

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Changes when the file does."""
        try:
            status = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size

    def _log_time(self) -> float:
        """When the log grew last, on the monotonic clock; now, if the file system's clock is ahead."""
        try:
            age = time.time() - (self.path / LOG_FILE).stat().st_mtime
        except FileNotFoundError:
            age = 0.0
        return time.monotonic() - max(0.0, age)

    def _status(self) -> Status:
        if self._record is None:
            lacks = "has no plan yet" if self.path.is_dir() else "does not exist yet"
            return Status("waiting", f"{self.path} {lacks}: waiting for it")
        try:
            locked = is_locked(self.path / LOG_FILE)
        except FileNotFoundError:
            locked = False
        quiet = max(0.0, time.monotonic() - self._grown_at)
        return judge_status(self._record, is_locked=locked, quiet_seconds=quiet)


def _render_parts(record: RunRecord, num_unreadable: int) -> dict[str, str]:
    """The parts in the order of the page; those without anything to show are left out."""
    records, sections = [record], record.sections
    measures = charts.measure_charts(records)
    settings = {**sections["settings"], **sections["task"], **sections["environment"]}
    parts = {
        "figures": render_figures(record),
        "faults": render_card(cards.faults_card(record.faults, record.resumed_steps), wide=True),
        "loss": render_card(charts.loss_chart(records)),
        "throughput": render_card(charts.throughput_chart(records)),
        **{f"measure-{number}": render_card(chart) for number, chart in enumerate(measures)},
        "lr": render_card(charts.lr_chart(records)),
        "grad-norm": render_card(charts.grad_norm_chart(records)),
        "memory": render_card(cards.memory_card(record.memory)),
        "data": render_card(cards.data_card(record.data), wide=True),
        "checkpoints": render_card(cards.checkpoints_card(record.checkpoints)),
        "unreadable": render_card(_unreadable_note(num_unreadable), wide=True),
        "settings": render_card(_folded("Settings", settings) + _folded("Plan", sections["plan"]), wide=True),
    }
    return {name: html for name, html in parts.items() if html}


def _folded(title: str, values: Mapping[str, Any]) -> str:
    return f"<details><summary>{title}</summary>{render_table_of_values(values)}</details>"


def _unreadable_note(number: int) -> str:
    if not number:
        return ""
    lines = "1 line of the log is" if number == 1 else f"{number:,} lines of the log are"
    return f"<p>{lines} invalid, and left out here.</p>"


def _render_status(status: Status) -> str:
    left = f"{format_duration(status.remaining_seconds)} left" if status.remaining_seconds is not None else ""
    done = f"step {status.step:,} of {status.num_steps:,}" if status.num_steps else ""
    fraction = min(1.0, status.step / status.num_steps) if status.num_steps else 0.0
    facts = "".join(f"<span>{render_text(text)}</span>" for text in (done, left) if text)
    return (
        f'<p class="state {status.state}"><b>{render_text(status.text)}</b>{facts}</p>'
        f'<div class="bar" role="progressbar" aria-valuenow="{100 * fraction:.0f}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-label="steps done"><div style="width: {100 * fraction:.2f}%"></div></div>'
    )
