"""Weights: how the ranks of a host bring new weights to each other, and split weights together before use.

slice      the part of every bucket that one rank updates, or brings from other hosts
published  this rank has updated its slice of a bucket; other hosts may still have to send theirs
Law: weights that exist once per host are written only after all its ranks have ended backward, and read only after
every rank has published its slice.
"""

import functools
import mmap
from collections import deque
from collections.abc import Callable, Sequence

import torch

from fourfold.parts.comm.reduce.inter_host import InterHostReducer
from fourfold.parts.comm.reduce.shared_memory.flag_waits import FlagWaits
from fourfold.parts.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.parts.comm.reduce.shared_memory.layout import (
    BACKWARD_DONE,
    COPIED,
    STAGED,
    WEIGHTS_READY,
    SharedMemoryLayout,
    view_staging_buffers,
    view_weights,
)
from fourfold.parts.comm.reduce.shared_memory.unshard_staging import HostUnshardStaging, StagingFlags


class HostWeights:
    """This rank's part in moving weights. `slices`: [start, stop) of this rank's slice of each bucket, in elements."""

    def __init__(
        self,
        mapping: mmap.mmap,
        layout: SharedMemoryLayout,
        host: HostRanks,
        flags: HostFlags,
        waits: FlagWaits,
        slices: Sequence[tuple[int, int]],
        inter_host: InterHostReducer | None,
    ) -> None:
        self._flags, self._waits, self._slices, self._inter_host = flags, waits, slices, inter_host
        self._pending_gathers: deque[Callable[[], None] | None] = deque()  # published, not yet complete on this host
        self._gather_numbers = [0] * len(slices)  # the number of each bucket's last publication
        self.is_writer = host.index == 0 or not layout.weights_bytes
        start = host.size * layout.region_bytes
        self.shared: Sequence[torch.Tensor] | None = None
        """The weights of each bucket, if they exist once per host."""
        if layout.weights_bytes:
            self.shared = view_weights(mapping, layout, start)
        self._staging: HostUnshardStaging | None = None
        if layout.staging_bytes:
            staging_flags = StagingFlags(
                signal_staged=functools.partial(flags.increment, STAGED),
                signal_copied=functools.partial(flags.increment, COPIED),
                wait_all_staged=functools.partial(waits.wait, STAGED),
                wait_all_copied=functools.partial(waits.wait, COPIED),
            )
            self._staging = HostUnshardStaging(view_staging_buffers(mapping, layout, start), staging_flags)
        self.unshards_params = self._staging is not None

    def signal_backward_done(self) -> None:
        self._flags.increment(BACKWARD_DONE)

    def wait_writable(self) -> None:
        if self.shared is not None:
            self._waits.wait(BACKWARD_DONE, self._flags.counts[BACKWARD_DONE])

    def all_gather_async(self, bucket: int, weight: torch.Tensor) -> None:
        """Publish this rank's slice of a bucket, and begin to send it to other hosts."""
        wait = None
        if self._inter_host is not None and self._inter_host.size > 1:
            wait = self._inter_host.all_gather_inplace_async(weight[slice(*self._slices[bucket])])
        self._pending_gathers.append(wait)
        self._gather_numbers[bucket] = self._flags.counts[WEIGHTS_READY] + len(self._pending_gathers)
        if wait is None:
            self._gather_through(self._gather_numbers[bucket])

    def wait(self, bucket: int) -> None:
        # Earlier buckets too, in program order: a rank of another host may be waiting for one of them.
        self._gather_through(self._gather_numbers[bucket])
        self._waits.wait(WEIGHTS_READY, self._gather_numbers[bucket])

    def finish_own_gathers(self) -> None:
        """Wait for other hosts' parts of all that this rank has published."""
        self._gather_through(self._flags.counts[WEIGHTS_READY] + len(self._pending_gathers))

    def wait_all(self) -> None:
        """Wait until every rank of the host has published as much as this one."""
        self._waits.wait(WEIGHTS_READY, self._flags.counts[WEIGHTS_READY])

    def _gather_through(self, number: int) -> None:
        """Complete this rank's first `number` publications in this host's memory, raising the flag after each."""
        while self._flags.counts[WEIGHTS_READY] < number:
            if (wait := self._pending_gathers.popleft()) is not None:
                wait()
            self._flags.increment(WEIGHTS_READY)

    def unshard_async(self, bucket: int, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        assert self._staging is not None
        assert self._inter_host is not None
        start_gather = functools.partial(self._inter_host.all_gather_async, shard)
        wait = self._staging.unshard_async(slice(*self._slices[bucket]), out, start_gather)

        def timed_wait() -> None:
            with self._waits.timed():
                wait()

        return timed_wait

    def broadcast(self) -> None:
        """Bring rank 0's weights to every host. Collective."""
        assert self.shared is not None
        if self._inter_host is not None and self.is_writer:
            for flat in self.shared:
                self._inter_host.broadcast(flat)
