"""Findings: the rows of the doctor's table, and the table as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    widths = [max(len(getattr(finding, name)) for finding in findings) for name in ("mark", "name", "value")]
    lines = []
    for finding in findings:
        cells = (finding.mark, finding.name, finding.value)
        line = "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append((line + (f"   try {finding.attempt}" if finding.attempt else "")).rstrip())
    marks = [finding.mark for finding in findings]
    bad = [f"{marks.count(mark)} {word}" for mark, word in ((FAIL, "failing"), (WARN, "to look at")) if mark in marks]
    return "\n".join([*lines, "", ", ".join(bad) or "nothing to mend"])
