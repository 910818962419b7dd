"""Damaged samples: those that a run has left out, and how many it may.

key  names a sample for people, such as its file and record
Law: a sample counts once, however often it comes; all ranks have the same list, in the same order.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fourfold.words.errors import Problem

MAX_NAMED = 8  # in a message


class DamagedRecord(NamedTuple):
    """A sample that could not be read. `number`: in its source."""

    number: int
    key: str
    reason: str = ""

    def __str__(self) -> str:
        return f"sample {self.key} cannot be read" + (f": {self.reason}" if self.reason else "")


def new_records(known: Iterable[DamagedRecord], found: Iterable[DamagedRecord]) -> tuple[DamagedRecord, ...]:
    """Those found that are not known, each once."""
    keys, result = {record.key for record in known}, []
    for record in found:
        if record.key not in keys:
            keys.add(record.key)
            result.append(record)
    return tuple(result)


def records_of_ranks(by_rank: Iterable[Sequence[Any]]) -> tuple[DamagedRecord, ...]:
    """The records that ranks have exchanged as JSON, by rank, each once: ranks may share samples."""
    return new_records((), (DamagedRecord(*record) for records in by_rank for record in records))


def too_many_problem(records: Sequence[DamagedRecord], limit: int) -> Problem | None:
    """The problem if more samples are damaged than may be left out; it names the last ones."""
    if len(records) <= limit:
        return None
    named = "; ".join(map(str, records[-MAX_NAMED:]))
    if len(records) == 1:
        attempt = "the data from its origin again, or bad_samples=1 to leave out as many such samples"
        return Problem(named, "a sample that is whole", attempt)
    more = "" if len(records) <= MAX_NAMED else f", {MAX_NAMED} of them"
    got = f"{len(records)} damaged samples{more}: {named}"
    return Problem(got, f"at most bad_samples = {limit}", "the data from its origin again, or a larger bad_samples")
