"""Flags: counters in shared memory by which the ranks of one host say how far they are.

flag   an int64 that only grows and that only its owner writes, in a cache line of its own
count  a flag's value: how many times its owner has done what the flag stands for
Law: every rank raises a flag for the same events in the same order, so equal counts mean the same event.

Plain stores of a flag become visible after the data written before it on x86-64 (total store order). Elsewhere this
transport is not used.
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from fourfold.comm.reduce.shared_memory.layout import FLAG_STRIDE, NUM_FLAGS


@dataclass(frozen=True)
class HostRanks:
    """The ranks of this host: their global ranks, and which of them this one is.

    check_peers  called now and then while this rank waits; raises PeerError if a rank has died
    """

    index: int
    ranks: tuple[int, ...]
    check_peers: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks[self.index]


class HostFlags:
    """This rank's flags, and its view of its peers'."""

    def __init__(self, mapping: mmap.mmap, region_bytes: int, *, index: int, size: int) -> None:
        self._index, self._size = index, size
        self._words = memoryview(mapping).cast("B").cast("q")
        self._region_words = region_bytes // 8
        self.counts = [0] * NUM_FLAGS
        """This rank's own counts."""

    def increment(self, flag: int) -> None:
        """Raise this rank's flag by one: what the flag stands for is done."""
        self.counts[flag] += 1
        self.write(flag, self.counts[flag])

    def write(self, flag: int, value: int) -> None:
        self._words[self._index * self._region_words + flag * FLAG_STRIDE] = value

    def read(self, flag: int, peer: int) -> int:
        return self._words[peer * self._region_words + flag * FLAG_STRIDE]

    def read_all(self, flag: int) -> list[int]:
        """The flag's counts, one per rank of the host."""
        return [self.read(flag, peer) for peer in range(self._size)]

    def min(self, flag: int) -> int:
        """How far the slowest rank is."""
        words, stride, start = self._words, self._region_words, flag * FLAG_STRIDE
        return min(words[peer * stride + start] for peer in range(self._size))
