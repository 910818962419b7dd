"""Weights: how the ranks of a host bring new weights to each other, and split weights together before use.

slice      the part of every bucket that one rank updates, or brings from other hosts
published  this rank has updated its slice of a bucket; other hosts may still have to send theirs
Law: weights that exist once per host are written only after all its ranks have ended backward, and read only after
every rank has published its slice.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence

import torch

from fourfold.parts.comm.reduce.inter_host import InterHostReducer
from fourfold.parts.comm.reduce.shared_memory.flag_waits import MappedHost
from fourfold.parts.comm.reduce.shared_memory.layout import (
    BACKWARD_DONE,
    COPIED,
    STAGED,
    WEIGHTS_READY,
    view_staging_buffers,
    view_weights,
)
from fourfold.parts.comm.reduce.shared_memory.unshard_staging import HostUnshardStaging, StagingFlags


class HostWeights:
    """See `WeightGatherer`. `slices`: [start, stop) of this rank's slice of each bucket, in elements."""

    def __init__(
        self, host: MappedHost, slices: Sequence[tuple[int, int]], between_hosts: InterHostReducer | None
    ) -> None:
        self._flags, self._waits, self._slices, self._between_hosts = host.flags, host.waits, slices, between_hosts
        self.size = host.ranks.size * (1 if between_hosts is None else between_hosts.num_hosts)
        self._pending_gathers: deque[Callable[[], None] | None] = deque()  # published, not yet complete on this host
        self._gather_numbers = [0] * len(slices)  # the number of each bucket's last publication
        layout = host.layout
        self.is_writer = host.ranks.index == 0 or not layout.weights_bytes
        start = host.ranks.size * layout.region_bytes
        self.shared_weights: Sequence[torch.Tensor] | None = None
        if layout.weights_bytes:
            self.shared_weights = view_weights(host.mapping, layout, start)
        self._staging: HostUnshardStaging | None = None
        if layout.staging_bytes:
            staging_flags = StagingFlags(
                signal_staged=functools.partial(self._flags.increment, STAGED),
                signal_copied=functools.partial(self._flags.increment, COPIED),
                wait_all_staged=functools.partial(self._waits.wait, STAGED),
                wait_all_copied=functools.partial(self._waits.wait, COPIED),
            )
            self._staging = HostUnshardStaging(view_staging_buffers(host.mapping, layout, start), staging_flags)
        self.unshards_params = self._staging is not None

    def signal_backward_done(self) -> None:
        self._flags.increment(BACKWARD_DONE)

    def wait_writable(self) -> None:
        if self.shared_weights is not None:
            self._waits.wait(BACKWARD_DONE, self._flags.counts[BACKWARD_DONE])

    def can_gather(self) -> bool:
        return True

    def all_gather_async(self, bucket: int, weight: torch.Tensor) -> None:
        wait = None
        if self._between_hosts is not None and self._between_hosts.size > 1:
            wait = self._between_hosts.all_gather_inplace_async(weight[slice(*self._slices[bucket])])
        self._pending_gathers.append(wait)
        self._gather_numbers[bucket] = self._flags.counts[WEIGHTS_READY] + len(self._pending_gathers)
        if wait is None:
            self._gather_through(self._gather_numbers[bucket])

    def wait(self, bucket: int) -> None:
        # Earlier buckets too, in program order: a rank of another host may be waiting for one of them.
        self._gather_through(self._gather_numbers[bucket])
        self._waits.wait(WEIGHTS_READY, self._gather_numbers[bucket])

    def end_step(self) -> None:
        self._gather_through(self._flags.counts[WEIGHTS_READY] + len(self._pending_gathers))
        # Once every rank of the host has published as much as this one, the weights are whole.
        self._waits.wait(WEIGHTS_READY, self._flags.counts[WEIGHTS_READY])

    def _gather_through(self, number: int) -> None:
        """Complete this rank's first `number` publications in this host's memory, raising the flag after each."""
        while self._flags.counts[WEIGHTS_READY] < number:
            if (wait := self._pending_gathers.popleft()) is not None:
                wait()
            self._flags.increment(WEIGHTS_READY)

    def unshard_async(
        self, bucket: int, shard: torch.Tensor, out: torch.Tensor, unshard_index: int | None
    ) -> Callable[[], None]:
        assert self._staging is not None
        assert self._between_hosts is not None
        start_gather = functools.partial(self._between_hosts.all_gather_async, shard)
        end_span = self._waits.meter.unsharding(unshard_index)
        wait = self._staging.unshard_async(slice(*self._slices[bucket]), out, start_gather)

        def timed_wait() -> None:
            with self._waits.meter.timed():
                wait()
            end_span()

        return timed_wait

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._between_hosts is not None
        with self._waits.meter.timed():
            return self._between_hosts.all_gather_ints(row)

    def broadcast(self) -> None:
        assert self.shared_weights is not None
        if self._between_hosts is not None and self.is_writer:
            for flat in self.shared_weights:
                self._between_hosts.broadcast(flat)
