"""Expected batches: a source that stages its samples is told which ones come, in the feed's order.

Law: telling a source what comes changes when its samples are read, never which.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from fourfold.feed.source import source_attribute
from fourfold.feed.stream import Stream
from fourfold.words.task import Source

Batch = TypeVar("Batch")


class Expected(Protocol):
    """What a source does ahead for the batches that are expected of it."""

    def advance(self) -> None:
        """The first of the expected batches has been read."""
        ...

    def close(self) -> None:
        """No more of them will be read."""
        ...


class NotStaged:
    """Nothing is done ahead."""

    def advance(self) -> None: ...

    def close(self) -> None: ...


NOT_STAGED = NotStaged()


class AllExpected(NamedTuple):
    """The same batches, expected of several sources."""

    parts: Sequence[Expected]

    def advance(self) -> None:
        for part in self.parts:
            part.advance()

    def close(self) -> None:
        for part in self.parts:
            part.close()


def expect_batches(source: Source | Stream, batches: Iterable[Sequence[int]]) -> Expected:
    """These samples of a source will be read, batch after batch."""
    expect = source_attribute(source, "expect_batches")
    return NOT_STAGED if expect is None else expect(batches)


def read_expected(
    source: Source | Stream, batches: Iterable[Batch], expected: Iterable[Sequence[int]]
) -> Iterator[Batch]:
    """The batches, of which `expected` has the sample ids."""
    ahead = expect_batches(source, expected)
    try:
        for batch in batches:
            ahead.advance()
            yield batch
    finally:
        ahead.close()
