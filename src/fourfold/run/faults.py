"""Faults: what a run has met and gone on from, a line each in `faults.jsonl` in its folder.

Law: lines are only ever appended; nothing that happened is forgotten when a run goes on from an earlier step.
"""

import time
from pathlib import Path

import msgspec

FAULTS = "faults.jsonl"
SKIPPED_STEP = "skipped step"


def append(
    folder: Path,
    *,
    kind: str,
    step: int,
    rank: int | None = None,
    host: str | None = None,
    text: str,
    seconds: float | None = None,
) -> None:
    """Write down one fault. `text` is one line for people; `seconds` is the time it cost. Raises OSError."""
    record = {"time": time.time(), "kind": kind, "step": step, "rank": rank, "host": host}
    line = msgspec.json.encode({**record, "text": text, "seconds": seconds}) + b"\n"
    # One write: lines of several processes do not mix.
    with (folder / FAULTS).open("ab", buffering=0) as file:
        file.write(line)
