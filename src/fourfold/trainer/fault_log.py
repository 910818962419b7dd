"""Faults: what went wrong in a run and what became of it, a line each in faults.jsonl.

Law: lines are appended and never taken back: a run that goes on from a checkpoint cuts its log, not its faults.
"""

from pathlib import Path

import msgspec

from fourfold.plan.decode import check_not_pipe

FAULTS_FILE = "faults.jsonl"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault.

    time     when it was noticed, in seconds since the epoch
    kind     "restart", "stopped", "hung", "terminated", "gave up", "lost rank", "skipped step"
    step     the last finished one, or the one that was skipped; -1 where nobody knows
    seconds  from the fault to the end of the first step after it; None where there was none, or nobody waited for it
    """

    time: float
    kind: str
    step: int
    rank: int | None = None
    host: str | None = None
    text: str = ""
    seconds: float | None = None


def append_fault(folder: Path, fault: Fault) -> None:
    """Write down a fault, in the run's folder. Raises OSError."""
    check_not_pipe(folder / FAULTS_FILE)
    with (folder / FAULTS_FILE).open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(fault) + b"\n")
