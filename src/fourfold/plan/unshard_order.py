"""Gathers: in which order the buckets of weights that rest split are brought together, the same on every rank.

use     an operation takes weights of some buckets
miss    a use of a bucket that this rank does not hold; it holds the `ROOM` buckets used last
phase   one forward, one backward, one evaluation: at its end every rank has taken part in the same gathers
script  the gathers of a phase in order: the misses of the phases before, learnt as they come
plea    a rank's word that it misses a bucket which is not to come any more: (bucket, the gather that it used last)
Law: every rank begins the gathers of a script in its order, whatever it uses itself; and pleas, which all ranks hear
before a phase ends, change every rank's script alike.

Two ranks may use weights in another order (a layer that depends on the data), or not at all (an empty batch). So a
rank that misses a bucket takes part in all gathers of the script before it; and where the script has it no more, it
pleads. The others answer when they plead too, or at the end of the phase. The first phase of a kind is all pleas.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Of buckets: a block's matrices, those of the block beside it, the small ones of all blocks (norms), one to spare.
MAX_UNSHARDED = 4
# Between hosts, of whole buckets, once a host: one that comes beside one that is taken.
NUM_STAGING_BUFFERS = 2


class MissingBucket(NamedTuple):
    """A rank's word that it misses a bucket; `after` is the place in the script of the gather it used last, or −1."""

    bucket: int
    after: int


class UnshardOrder:
    """The gathers of one kind of phase, and how far this rank has come in it."""

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.begin_phase()

    def begin_phase(self) -> None:
        """Begin a phase."""
        self._next = 0
        self._last_used = -1
        self._last_positions: dict[int, int] = {}  # of the gather that brought a bucket last

    @property
    def has_ended(self) -> bool:
        """Whether this rank has begun all gathers that are known."""
        return self._next == len(self.buckets)

    def next_bucket(self) -> int:
        """The bucket of the next gather, which this rank begins now."""
        bucket = self.buckets[self._next]
        self._last_positions[bucket] = self._next
        self._next += 1
        return bucket

    def is_pending(self, bucket: int) -> bool:
        return bucket in self.buckets[self._next :]

    def mark_used(self, bucket: int) -> None:
        """This rank uses what the last gather of the bucket brought."""
        self._last_used = max(self._last_used, self._last_positions[bucket])

    def missing_bucket(self, bucket: int) -> MissingBucket:
        return MissingBucket(bucket, self._last_used)

    def insert_missing(self, missing: Sequence[MissingBucket]) -> list[int]:
        """Put what is pleaded for into the script, behind what its rank used last: the buckets to be gathered now.

        `pleas` are those of all ranks in rank order; each bucket is gathered once. All ranks have come to the end.
        """
        assert self.has_ended
        done: dict[int, int] = {}
        for bucket, after in missing:
            if bucket in done:
                continue
            # What was put in since that rank spoke has moved the place it means.
            for place in sorted(done.values()):
                after += place <= after
            self._insert(bucket, after + 1)
            done = {each: place + (place > after) for each, place in done.items()} | {bucket: after + 1}
        self._last_positions |= done
        return list(done)

    def _insert(self, bucket: int, place: int) -> None:
        self.buckets.insert(place, bucket)
        self._next += 1
        self._last_used += self._last_used >= place
        self._last_positions = {each: before + (before >= place) for each, before in self._last_positions.items()}
