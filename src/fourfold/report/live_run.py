"""Live run: a run's folder as the live page shows it, read again where it has changed.

part     a piece of the page under a name: HTML, all text of the run escaped
version  of the parts; changes when any of them may have changed
Law: a folder in any state gives a page: one that does not exist yet, that is being written, or that cannot be read.
"""

import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.environment.file_lock import is_locked
from fourfold.report import charts, checkpoint_card, faults
from fourfold.report.data_card import data_card
from fourfold.report.html_page import render_card, render_table_of_values
from fourfold.report.html_table import render_text
from fourfold.report.log_tail import LogTail
from fourfold.report.memory_card import memory_card
from fourfold.report.page import describe_run, render_figures
from fourfold.report.run_record import ReportError, RunRecord, make_record, read_description
from fourfold.report.run_status import Status, judge_status
from fourfold.trainer.fault_log import FAULTS_FILE
from fourfold.trainer.progress import format_duration
from fourfold.words.errors import os_error_text
from fourfold.words.run_files import LOG_FILE, PLAN_FILE, SETTINGS_FILE

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
        "faults": render_card(faults.faults_card(record.faults, record.resumed_steps), wide=True),
        "loss": render_card(charts.loss_chart(records)),
        "throughput": render_card(charts.throughput_chart(records)),
        **{f"measure-{number}": render_card(chart) for number, chart in enumerate(measures)},
        "lr": render_card(charts.lr_chart(records)),
        "grad-norm": render_card(charts.grad_norm_chart(records)),
        "memory": render_card(memory_card(record.memory)),
        "data": render_card(data_card(record.data), wide=True),
        "checkpoints": render_card(checkpoint_card.checkpoints_card(record.checkpoints)),
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
