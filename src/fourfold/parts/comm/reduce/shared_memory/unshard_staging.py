"""Staging: weights that rest split between hosts are gathered in memory that a host's ranks share.

buffer  room for a whole bucket; buckets use a few buffers in rotation
staged  this rank's slice has come from all hosts
copied  this rank has copied the bucket to where it needs it
Law: a buffer is written again only after every rank of the host has copied what was there.

Between hosts each rank brings one slice, so a bucket crosses the network once per host and not once per rank. Each
rank then copies the whole bucket, and keeps its copy as long as it needs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fourfold.plan.unshard_order import NUM_STAGING_BUFFERS


class StagingFlags(NamedTuple):
    """Raise this rank's flag, or wait until every rank's flag has reached a count."""

    signal_staged: Callable[[], None]
    signal_copied: Callable[[], None]
    wait_all_staged: Callable[[int], None]
    wait_all_copied: Callable[[int], None]


class HostUnshardStaging:
    """This rank's part in gathering buckets. Every rank of the host gathers the same buckets in the same order."""

    def __init__(self, buffers: Sequence[torch.Tensor], flags: StagingFlags) -> None:
        """`buffers`: uint8, one flat tensor each."""
        self._buffers, self._flags = buffers, flags
        self._num_begun = 0

    def unshard_async(
        self, local_slice: slice, out: torch.Tensor, start_gather: Callable[[torch.Tensor], Callable[[], None]]
    ) -> Callable[[], None]:
        """Begin to gather a bucket into `out`. Returns the wait; waits are called in the order of the gathers.

        `start_gather(flat)` begins to gather this rank's slice from all hosts into `flat`, and returns the wait.
        """
        self._num_begun += 1
        number = self._num_begun
        self._flags.wait_all_copied(number - NUM_STAGING_BUFFERS)
        buffer = self._buffers[number % NUM_STAGING_BUFFERS][: out.numel() * out.element_size()].view(out.dtype)
        wait = start_gather(buffer[local_slice])

        def wait_and_copy() -> None:
            wait()
            self._flags.signal_staged()
            self._flags.wait_all_staged(number)
            out.copy_(buffer)
            self._flags.signal_copied()

        return wait_and_copy
