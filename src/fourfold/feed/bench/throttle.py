"""Throttled origin: a source that delivers so many bytes a second, to all ranks together, as slow storage does.

bucket  when the origin will have delivered all that was asked of it; shared by the ranks of a host
Law: in any interval the origin delivers at most rate × its length, and one read more: what is not used is lost.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fourfold.feed.source import BatchSource


class SharedTime(Protocol):
    """A time that several ranks read and change, and its lock: such as `multiprocessing.Value("d")`."""

    value: float

    def get_lock(self) -> AbstractContextManager[Any]: ...


class CountedSource(BatchSource, Protocol):
    """A source that counts what it reads from storage."""

    @property
    def bytes_read(self) -> int: ...


class TokenBucket:
    """The origin's rate, in bytes a second."""

    def __init__(self, rate: float, free_at: SharedTime) -> None:
        self.rate, self._free_at = rate, free_at

    def reserve(self, num_bytes: int, now: float) -> float:
        """When these bytes will have been delivered, on the clock of `now`."""
        with self._free_at.get_lock():
            self._free_at.value = max(now, self._free_at.value) + num_bytes / self.rate
            return self._free_at.value


class ThrottledSource:
    """A source behind a slow origin. `source.bytes_read` says what a read costs."""

    def __init__(self, source: CountedSource, bucket: TokenBucket) -> None:
        self._source, self._bucket = source, bucket
        self.bytes_read = 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> Any:
        return self._delivered(self._source.__getitem__, index)

    def fetch(self, indices: Sequence[int], /) -> Any:
        return self._delivered(self._source.fetch, indices)

    def _delivered(self, read: Any, what: Any) -> Any:
        before = self._source.bytes_read
        values = read(what)
        # One clock for all processes of a host.
        num_bytes = self._source.bytes_read - before
        ready = self._bucket.reserve(num_bytes, time.monotonic())
        time.sleep(max(0.0, ready - time.monotonic()))
        self.bytes_read += num_bytes
        return values
