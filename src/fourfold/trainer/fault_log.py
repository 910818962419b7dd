"""Fault log: what went wrong in a run and how it went on, a line per fault in faults.jsonl.

Law: lines are only appended. A run that resumes from a checkpoint truncates its log of steps, not its faults.
"""

from pathlib import Path

import msgspec

from fourfold.plan.decode import check_not_pipe

FAULTS_FILE = "faults.jsonl"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault.

    time     when it was noticed, in seconds since the epoch
    kind     "restart", "stopped", "hung", "terminated", "gave up", "lost rank", "skipped step", "callback failed",
             "damaged sample"
    step     the last finished step, or the skipped one; -1 if unknown
    seconds  from the fault to the end of the first step after it; None if that was not measured
    """

    time: float
    kind: str
    step: int
    rank: int | None = None
    host: str | None = None
    text: str = ""
    seconds: float | None = None


def append_fault(folder: Path, fault: Fault) -> None:
    """Append a fault to the list in the run's folder. Raises OSError."""
    check_not_pipe(folder / FAULTS_FILE)
    with (folder / FAULTS_FILE).open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(fault) + b"\n")
