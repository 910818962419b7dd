"""Readable samples: a batch without the samples that are damaged.

damaged sample  one for which the source raises DamagedSample
Law: a batch has the samples that can be read, in their order; each of the others is named. None is replaced.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fourfold.feed.source import empty_like, fetch
from fourfold.plan.damaged_samples import DamagedRecord, too_many_problem
from fourfold.words.errors import DamagedSample, DataError, Problem
from fourfold.words.task import Source
from fourfold.words.terminal_text import escape_controls

NUM_TRIED = 64  # samples, for the shapes of a batch that has none
NUM_ATTEMPTS = 3  # a sample may be readable once and damaged the next time


class Fetched(NamedTuple):
    """A batch, and what is missing from it: indices into the requested numbers, and their records."""

    values: Any
    left_out: Sequence[int] = ()
    damaged: Sequence[DamagedRecord] = ()


def fetch_readable(
    source: Source, numbers: Sequence[int], *, before_sample: Callable[[int], None] | None = None
) -> Fetched:
    """The batch of those of these samples that can be read; see `feed.source.fetch`.

    Raises DataError if none of many samples can be read, so that not even the shapes of a batch are known.
    """
    left_out: dict[int, DamagedRecord] = {}
    num_attempts = 0
    while True:
        kept = [number for index, number in enumerate(numbers) if index not in left_out]
        try:
            if kept or not numbers:
                values = fetch(source, kept, before_sample=before_sample)
            else:
                values = empty_like(fetch_any(source, before_sample=before_sample))
        except DamagedSample:
            if not numbers:  # a batch of no samples takes its shapes from the first one
                return Fetched(empty_like(fetch_any(source, before_sample=before_sample)))
            num_attempts += 1
            if num_attempts == NUM_ATTEMPTS:
                raise  # each sample can be read by itself, and not with the others: the source itself is at fault
            left_out |= _find_damaged(source, numbers, left_out, before_sample)
        else:
            indices = sorted(left_out)
            return Fetched(values, indices, [left_out[index] for index in indices])


def fetch_any(source: Source, *, before_sample: Callable[[int], None] | None = None) -> Any:
    """A batch of one sample: the first of some, spread evenly, that can be read."""
    length, errors = len(source), []
    for number in dict.fromkeys(index * length // NUM_TRIED for index in range(NUM_TRIED)):
        try:
            return fetch(source, [number], before_sample=before_sample)
        except DamagedSample as error:
            errors.append(error)
    got = f"{len(errors)} samples of which none can be read, the first of them {errors[0].key}: {errors[0].reason}"
    raise DataError(Problem(got, "a sample that shows the shapes of a batch"), where="the source") from errors[0]


def _find_damaged(
    source: Source, numbers: Sequence[int], known: dict[int, DamagedRecord], before: Callable[[int], None] | None
) -> dict[int, DamagedRecord]:
    """By index into `numbers`: the samples that cannot be read, each tried by itself."""
    found = {}
    for index, number in enumerate(numbers):
        if index not in known:
            try:
                fetch(source, [number], before_sample=before)
            except DamagedSample as error:
                # In files of the run, which are UTF-8: the names in archives, and of files, may be any bytes.
                key, reason = escape_controls(error.key), escape_controls(error.reason)
                found[index] = DamagedRecord(int(number), key, reason)
    return found


def check_damage(records: Sequence[DamagedRecord], limit: int) -> None:
    """Raise DataError if more samples are damaged than may be left out: DamagedSample of the first one."""
    problem = too_many_problem(records, limit)
    if problem is None:
        return
    if len(records) == 1:
        raise DamagedSample(records[0].key, records[0].reason)
    raise DataError(problem, where="the source")
