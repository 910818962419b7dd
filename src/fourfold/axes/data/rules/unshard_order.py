"""Unshard order: the order in which buckets of sharded weights are all-gathered, the same on every rank.

use          an operation reads weights of some buckets
miss         a use of a bucket that is not unsharded on this rank; a rank keeps the MAX_UNSHARDED buckets it used last
phase        one forward, one backward or one evaluation; every rank takes part in the same all-gathers of a phase
order        the all-gathers of a phase: the misses of earlier phases of this kind, inserted as they occur
miss report  (bucket, last all-gather used), sent when a rank misses a bucket without another all-gather in the order
Law: every rank begins all all-gathers in this order, whatever it uses itself. Ranks all-gather the miss reports before
a phase ends, so every rank inserts the same all-gathers into the same order.

Two ranks may use weights in different orders (a layer that depends on the data), or not at all (an empty batch). So a
rank that misses a bucket takes part in all all-gathers in front of it in the order; if the bucket does not occur any
more, the rank reports the miss. The others answer when they report a miss too, or at the end of the phase. In the first
phase of a kind the order is empty, and every all-gather comes from a miss report.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Buckets: the matrices of a block, those of the next block, the small parameters of all blocks (norms), one to spare.
MAX_UNSHARDED = 4
# Unsharded buckets per host that receives from other hosts: one that is being received, one that ranks copy from.
NUM_STAGING_BUFFERS = 2


class MissingBucket(NamedTuple):
    """A miss report; `after` is the position in the order of the all-gather that the rank used last, or −1."""

    bucket: int
    after: int


class UnshardOrder:
    """The order of all-gathers in one kind of phase, and this rank's position in it."""

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.begin_phase()

    def begin_phase(self) -> None:
        """Begin a phase."""
        self._next = 0
        self._last_used = -1
        self._last_positions: dict[int, int] = {}  # bucket -> position of its last all-gather

    @property
    def has_ended(self) -> bool:
        """Whether this rank has begun all all-gathers of the order."""
        return self._next == len(self.buckets)

    def next_bucket(self) -> int:
        """The bucket of the next all-gather, which the caller begins now."""
        bucket = self.buckets[self._next]
        self._last_positions[bucket] = self._next
        self._next += 1
        return bucket

    def is_pending(self, bucket: int) -> bool:
        """Whether the bucket has an all-gather that this rank has not begun."""
        return bucket in self.buckets[self._next :]

    def mark_used(self, bucket: int) -> None:
        """Record that this rank uses the result of the bucket's last all-gather."""
        self._last_used = max(self._last_used, self._last_positions[bucket])

    def missing_bucket(self, bucket: int) -> MissingBucket:
        """The report that this rank misses a bucket."""
        return MissingBucket(bucket, self._last_used)

    def insert_missing(self, missing: Sequence[MissingBucket]) -> list[int]:
        """Insert an all-gather for every reported bucket, after the one its rank used last. Returns these buckets.

        `missing` are the reports of all ranks in rank order; each bucket is gathered once. All ranks must have begun
        every all-gather of the order.
        """
        assert self.has_ended
        inserted: dict[int, int] = {}
        for bucket, after in missing:
            if bucket in inserted:
                continue
            # Insertions since the report shift the position that it refers to.
            for position in sorted(inserted.values()):
                after += position <= after
            self._insert(bucket, after + 1)
            inserted = {each: position + (position > after) for each, position in inserted.items()}
            inserted[bucket] = after + 1
        self._last_positions |= inserted
        return list(inserted)

    def _insert(self, bucket: int, position: int) -> None:
        self.buckets.insert(position, bucket)
        self._next += 1
        self._last_used += self._last_used >= position
        self._last_positions = {each: last + (last >= position) for each, last in self._last_positions.items()}
