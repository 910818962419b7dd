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

from fourfold.plan.unshard_order import NUM_STAGING_BUFFERS


class StagingFlags(NamedTuple):
    """How the ranks of a host tell each other: raise one's own counter; wait until everybody's has reached a count."""

    signal_staged: Callable[[], None]
    signal_copied: Callable[[], None]
    wait_all_staged: Callable[[int], None]
    wait_all_copied: Callable[[int], None]


class HostUnshardStaging:
    """This rank's part in bringing buckets to its host. Every rank brings the same ones in the same order."""

    def __init__(self, buffers: Sequence[torch.Tensor], flags: StagingFlags) -> None:
        """`stages` are bytes."""
        self._buffers, self._flags = buffers, flags
        self._num_begun = 0

    def unshard_async(
        self, local_slice: slice, out: torch.Tensor, start_gather: Callable[[torch.Tensor], Callable[[], None]]
    ) -> Callable[[], None]:
        """Begin to bring a bucket into `out`. `begin` brings what comes from other hosts into this rank's `part` of it.

        The returned function waits; these must be called in the order of beginnings.
        """
        self._num_begun += 1
        number = self._num_begun
        self._flags.wait_all_copied(number - NUM_STAGING_BUFFERS)
        stage = self._buffers[number % NUM_STAGING_BUFFERS][: out.numel() * out.element_size()].view(out.dtype)
        land = start_gather(stage[local_slice])

        def wait_and_copy() -> None:
            land()
            self._flags.signal_staged()
            self._flags.wait_all_staged(number)
            out.copy_(stage)
            self._flags.signal_copied()

        return wait_and_copy
