"""Findings: the rows of the doctor's table, and the table as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fourfold.words.text_table import align_columns

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One row. `attempt` is what to try where the mark is not ok."""

    name: str
    mark: str
    value: str
    attempt: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where anything fails."""
    return int(any(finding.mark == FAIL for finding in findings))


def format_findings(findings: Sequence[Finding]) -> str:
    """The findings for people: aligned rows, and a last line that counts them."""
    rows = [(f.mark, f.name, f.value, f"try {f.attempt}" if f.attempt else "") for f in findings]
    lines = align_columns(rows, "<<<<", gap="   ")
    marks = [finding.mark for finding in findings]
    bad = [f"{marks.count(mark)} {word}" for mark, word in ((FAIL, "failing"), (WARN, "to look at")) if mark in marks]
    return "\n".join([*lines, "", ", ".join(bad) or "nothing to mend"])
