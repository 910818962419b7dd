"""Faults on the page: what went wrong in a run, when, and how long it took until training went on.

fault  a line of faults.jsonl in the run's folder (`trainer/fault_log.py`), of this version or a later one
Law: an unknown kind of fault is shown like any other; a line that cannot be read is counted, and hides no other.
"""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import NamedTuple

from fourfold.plan.decode import DecodeError, check_not_pipe, from_json
from fourfold.report.html_table import UNKNOWN, render_row, render_table
from fourfold.report.line_chart import Series
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from fourfold.trainer.progress import format_seconds
from fourfold.words.terminal_text import escape_controls

RESTART, SKIPPED = "restart", "skipped step"
MAX_NAME_LENGTH = 14  # letters that fit into a drawing's legend
MAX_NAMED_STEPS = 5
COLUMNS = ("when, UTC", "what", "step", "where", "back after", "")


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
    rows = [render_row(_row_cells(fault)) for fault in sorted(known, key=lambda fault: fault.time)]
    table = render_table(COLUMNS, rows, style="faults") if rows else ""
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


def _row_cells(fault: Fault) -> Sequence[str]:
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
