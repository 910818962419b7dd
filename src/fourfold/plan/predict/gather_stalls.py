"""Gather stalls: how a forward or backward waits inside for weights that are gathered one after the other.

offset   seconds of computing in front of the first use of a bucket
arrival  seconds from the begin of the phase until the bucket is there: the phase begins in time for the first one, and
         the others arrive in turn
Law: a phase without stalls is one in which each bucket arrives before its use; a stall delays all that comes behind it.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self


class GatherStalls(NamedTuple):
    """By bucket that a phase gathers, in the order of the gathers."""

    offsets: tuple[float, ...] = ()
    arrivals: tuple[float, ...] = ()

    @classmethod
    def of(cls, offsets: Sequence[float], sent: Sequence[float]) -> Self:
        """`sent`: the seconds of each gather."""
        if not any(sent):
            return cls()
        ends = list(itertools.accumulate(sent))
        return cls(tuple(offsets), tuple(offsets[0] + end - ends[0] for end in ends))

    def waited(self, computed: float) -> float:
        """Seconds that the phase has waited when it has computed for so long."""
        pairs = zip(self.offsets, self.arrivals, strict=True)
        return max((arrival - offset for offset, arrival in pairs if offset <= computed), default=0.0)

    @property
    def total(self) -> float:
        return self.waited(float("inf"))

    def reduction_overlap(self, remaining: float, window: float) -> float:
        """How long before the end of a backward a bucket's gradients can be sent.

        The backward computes for `window` seconds, the last `remaining` of them after these gradients. Gathers and
        reductions share a network, and gathers come first.
        """
        ready = window - remaining + self.waited(window - remaining)
        return window + self.total - max(ready, max(self.arrivals, default=0.0))
