"""Findings: the rows of the doctor's table, its exit code, and the table as text.

finding  one row: ok, warn or fail, the value found, and what to try if it is not ok
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fourfold.words.terminal_text import terminal_width
from fourfold.words.text_table import align_columns

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One row. `attempt` is what to try if the mark is not ok."""

    name: str
    mark: str
    value: str
    attempt: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if any row fails, else 0."""
    return int(any(finding.mark == FAIL for finding in findings))


def format_findings(findings: Sequence[Finding]) -> str:
    """Aligned rows, and a last line that counts those that are not ok."""
    rows = [(f.mark, f.name, f.value, f"try {f.attempt}" if f.attempt else "") for f in findings]
    lines = align_columns(rows, "<<<<", gap="   ")
    if max(map(len, lines)) > terminal_width():
        stacked = [each for *row, attempt in rows for each in ((*row,), ("", "", attempt)) if each[-1]]
        lines = align_columns(stacked, "<<<", gap="   ")
    marks = [finding.mark for finding in findings]
    bad = [f"{marks.count(mark)} {word}" for mark, word in ((FAIL, "failing"), (WARN, "to look at")) if mark in marks]
    return "\n".join([*lines, "", ", ".join(bad) or "nothing to fix"])
