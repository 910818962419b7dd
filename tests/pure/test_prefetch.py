"""Laws of the depth to which batches are read ahead."""

import contextlib
import threading
import time

import pytest

from fourfold.feed.reading import MAX_PREFETCH_DEPTH, PREFETCH_DEPTH, prefetch


class Reader:
    """Numbers, each read when `permits` lets it."""

    def __init__(self):
        self.permits, self.num_read, self.num_taken = threading.Semaphore(0), 0, 0
        self.loop = prefetch(lambda is_open: self.items(), is_on_demand=lambda: False, check_peers=self.permits.release)

    def items(self):
        while True:
            self.permits.acquire()
            self.num_read += 1
            yield self.num_read

    def take(self):
        """The loop takes an item. If it has to wait, one more may be read."""
        self.num_taken += 1
        assert next(self.loop) == self.num_taken

    def num_ahead(self, depth):
        """How many are read ahead when nothing holds the reader up, and it has time for `depth` and one in its hand."""
        self.permits.release(100)
        deadline = time.monotonic() + 10
        while self.num_read < self.num_taken + depth + 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        while self.permits.acquire(blocking=False):
            pass
        return self.num_read - self.num_taken - 1  # without the one in its hand


@pytest.fixture
def reader():
    made = Reader()
    with contextlib.closing(made.loop):
        yield made
        made.permits.release(100)


def test_a_reader_that_is_idle_and_then_late_reads_further_ahead_up_to_a_bound(reader):
    reader.take()
    depth, found = PREFETCH_DEPTH, []
    for _ in range(MAX_PREFETCH_DEPTH + 2):
        found.append(reader.num_ahead(depth))
        for _ in range(found[-1] + 2):  # all that are read, and one for which the loop waits
            reader.take()
        depth = min(depth + 1, MAX_PREFETCH_DEPTH)
    assert found[0] == PREFETCH_DEPTH
    assert found[-1] == max(found) == MAX_PREFETCH_DEPTH


def test_a_reader_that_is_always_late_reads_no_further_ahead(reader):
    for _ in range(6):
        reader.take()
    assert reader.num_ahead(PREFETCH_DEPTH) == PREFETCH_DEPTH
