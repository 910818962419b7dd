"""Staging: weights that rest split between hosts, brought together in memory that a host's ranks share.

stage   room for a whole bucket; buckets take turns in a few of them
staged  this rank's slice has come, from all hosts
taken   this rank has copied the bucket to where it wants it
Law: a stage is written again only when every rank of the host has taken what was there.

Between hosts each rank brings one slice, so that a bucket crosses the network once a host and not once a rank. Each
rank then copies the whole: how long it needs it is its own affair.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fourfold.plan.gathers import NUM_STAGES


class Flags(NamedTuple):
    """How the ranks of a host tell each other: raise one's own counter; wait until everybody's has reached a count."""

    staged: Callable[[], None]
    taken: Callable[[], None]
    all_staged: Callable[[int], None]
    all_taken: Callable[[int], None]


class Staging:
    """This rank's part in bringing buckets to its host. Every rank brings the same ones in the same order."""

    def __init__(self, stages: Sequence[torch.Tensor], flags: Flags) -> None:
        """`stages` are bytes."""
        self._stages, self._flags = stages, flags
        self._begun = 0

    def bring(
        self, part: slice, out: torch.Tensor, begin: Callable[[torch.Tensor], Callable[[], None]]
    ) -> Callable[[], None]:
        """Begin to bring a bucket into `out`. `begin` brings what comes from other hosts into this rank's `part` of it.

        The returned function waits; these must be called in the order of beginnings.
        """
        self._begun += 1
        number = self._begun
        self._flags.all_taken(number - NUM_STAGES)
        stage = self._stages[number % NUM_STAGES][: out.numel() * out.element_size()].view(out.dtype)
        land = begin(stage[part])

        def land_and_take() -> None:
            land()
            self._flags.staged()
            self._flags.all_staged(number)
            out.copy_(stage)
            self._flags.taken()

        return land_and_take
