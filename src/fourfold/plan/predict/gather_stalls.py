"""Gather stalls: how a forward or backward waits inside for weights that are gathered one after the other.

offset   seconds of computing in front of the first use of a bucket
arrival  seconds from the begin of the phase until the bucket is there: the phase begins in time for the first one, and
         the others arrive in turn
Law: a phase without stalls is one in which each bucket arrives before its use; a stall delays all that comes behind it.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self


class GatherStalls(NamedTuple):
    """By bucket that a phase gathers, in the order of their first uses.

    waits         the longest wait for a bucket that is used no later
    last_arrival  of all buckets
    """

    offsets: tuple[float, ...] = ()
    waits: tuple[float, ...] = ()
    last_arrival: float = 0.0

    @classmethod
    def of(cls, offsets: Sequence[float], sent: Sequence[float]) -> Self:
        """`offsets`, `sent`: of each gather, in their order; the seconds that it takes."""
        if not any(sent):
            return cls()
        arrivals = [offsets[0] + end - sent[0] for end in itertools.accumulate(sent)]
        by_use = sorted(zip(offsets, arrivals, strict=True))
        waits = itertools.accumulate((arrival - offset for offset, arrival in by_use), max)
        return cls(tuple(offset for offset, _ in by_use), tuple(waits), max(arrivals))

    def waited(self, computed: float) -> float:
        """Seconds that the phase has waited when it has computed for so long."""
        num_used = bisect.bisect_right(self.offsets, computed)
        return self.waits[num_used - 1] if num_used else 0.0

    @property
    def total(self) -> float:
        return self.waits[-1] if self.waits else 0.0

    def reduction_overlap(self, remaining: float, window: float) -> float:
        """How long before the end of a backward a bucket's gradients can be sent.

        The backward computes for `window` seconds, the last `remaining` of them after these gradients. Gathers and
        reductions share a network, and gathers come first.
        """
        ready = window - remaining + self.waited(window - remaining)
        return window + self.total - max(ready, self.last_arrival)
