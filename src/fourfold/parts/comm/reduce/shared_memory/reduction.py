"""Reduction: the processes of one host sum gradients without sending a message.

buffer  a rank's flat gradient of a bucket, in memory that all ranks of the host map; where it lies is in `layout`
slice   the part of every bucket that one rank sums, in rank order, into its own buffer
number  of a launch: the how-manieth it is since the start, and the count that GRADS_READY and REDUCED reach by it
Law: a buffer is written only while no other rank may read it. A rank reads other ranks' buffers after GRADS_READY says
that they are complete, and other ranks' sums after REDUCED; no rank writes again before STEP_ENDED says that all have
read.

To sum, a rank reads its slice of all N buffers and writes one slice, 1/N of the bucket; the update then reads every
slice where its owner put it. Measured: `docs/measured-notes.md`, "Collectives".
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fourfold.parts.comm.reduce.async_result import AsyncResult
from fourfold.parts.comm.reduce.grad_shards import GradShards
from fourfold.parts.comm.reduce.inter_host import InterHostReducer
from fourfold.parts.comm.reduce.protocol import BucketSlice
from fourfold.parts.comm.reduce.shared_memory.flag_waits import MappedHost
from fourfold.parts.comm.reduce.shared_memory.host_buffers import HostBuffers
from fourfold.parts.comm.reduce.shared_memory.layout import GRADS_READY, REDUCED, SCALED, STEP_ENDED
from fourfold.plan.data.zero import RestingLayouts
from fourfold.words.layout import SPLIT


class _HostReducer:
    """What `EagerReducer` and `LazyReducer` have in common; see `GradReducer`."""

    def __init__(self, host: MappedHost, buffers: HostBuffers, between_hosts: InterHostReducer | None) -> None:
        self._flags, self._waits, self._buffers = host.flags, host.waits, buffers
        self.size = host.ranks.size * (1 if between_hosts is None else between_hosts.num_hosts)
        self.replica_index = 0 if between_hosts is None else between_hosts.replica_index
        self.grad_buffers, self.buffer_indices = buffers.own, host.layout.buffer_indices
        self._launch_numbers = [0] * len(self.grad_buffers)
        """The number of each bucket's last launch."""

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        self._waits.wait(STEP_ENDED, self._flags.counts[STEP_ENDED])

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return self._flags.min(STEP_ENDED) >= self._flags.counts[STEP_ENDED]

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        self._flags.increment(GRADS_READY)
        self._launch_numbers[bucket] = self._flags.counts[GRADS_READY]

    def grad_shard(self, bucket: int) -> BucketSlice:
        return self._buffers.own_shard(bucket)

    def end_step(self) -> None:
        self._flags.increment(STEP_ENDED)


class _Launch(NamedTuple):
    """A bucket that this rank has launched, and whose sum it has not begun."""

    bucket: int
    reduction_index: int | None


class EagerReducer(_HostReducer):
    """See `GradReducer`: every rank sums its slice of a bucket as soon as all ranks have launched it.

    `is_prereduced`: a codec has already summed between hosts, so the ranks of a host add up to the whole sum.
    """

    def __init__(
        self,
        host: MappedHost,
        buffers: HostBuffers,
        between_hosts: InterHostReducer | None,
        *,
        rest: RestingLayouts,
        is_prereduced: bool,
    ) -> None:
        super().__init__(host, buffers, between_hosts)
        self._is_split = rest.state == SPLIT
        self._grad_shards = GradShards(self.grad_buffers, buffers.num_shards) if rest.gradient == SPLIT else None
        self._sum_between_hosts: Callable[[Tensor], AsyncResult] | None = None
        if between_hosts is not None and not is_prereduced:
            self._sum_between_hosts = (
                between_hosts.reduce_scatter_async if self._is_split else between_hosts.all_reduce_async
            )
        self._launched: list[_Launch] = []  # in program order
        self._between_hosts: deque[tuple[int, AsyncResult]] = deque()  # summed here, on their way between hosts

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        super().acquire_buffer(bucket, factor)
        if self._grad_shards is not None:
            last = self._last_launch_of_buffer(bucket)
            self._reduce_through(last, factor)
            self._waits.wait(REDUCED, last)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        self._advance(factor)
        is_read = self._grad_shards is None or self._flags.min(REDUCED) >= self._last_launch_of_buffer(bucket)
        return is_read and super().can_acquire_buffer(bucket, factor)

    def _last_launch_of_buffer(self, bucket: int) -> int:
        """The number of the last launch among the buckets that share this bucket's buffer."""
        index = self.buffer_indices[bucket]
        return max(n for n, each in zip(self._launch_numbers, self.buffer_indices, strict=True) if each == index)

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        self._launched.append(_Launch(bucket, reduction_index))
        super().reduce_async(bucket, reduction_index, factor)
        self._sum_ready(factor)

    def wait_reduce(self, bucket: int, factor: float) -> None:
        number = self._launch_numbers[bucket]
        if self._num_reduced() < number:
            with self._waits.meter.timed():
                self._reduce_through(number, factor)
                if not self._is_split:
                    self._waits.wait(REDUCED, number)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        self._advance(factor)
        return self._num_reduced() >= self._launch_numbers[bucket]

    def _num_reduced(self) -> int:
        """How many reductions are done as far as this rank needs them: its own slices, or all ranks'."""
        return self._flags.counts[REDUCED] if self._is_split else self._flags.min(REDUCED)

    def _advance(self, factor: float | None) -> None:
        """Do this rank's part of reductions, as far as that needs no wait."""
        self._sum_ready(factor)
        while self._between_hosts and self._between_hosts[0][1].is_done():
            self._finish_first()

    def _reduce_through(self, number: int, factor: float | None) -> None:
        """Do this rank's part of the first `number` reductions."""
        assert factor is not None or self._is_split
        while self._flags.counts[REDUCED] < number:
            self._sum_ready(factor)
            if self._between_hosts:
                # Before any wait for a later launch: the rank that is to launch it may be waiting for this sum.
                self._finish_first()
            elif self._flags.counts[REDUCED] < number:
                self._waits.wait(GRADS_READY, self._num_begun() + 1)

    def _num_begun(self) -> int:
        """How many launches this rank has begun to sum."""
        return self._flags.counts[GRADS_READY] - len(self._launched)

    def _sum_ready(self, factor: float | None) -> None:
        """Sum this rank's slice of every bucket that all ranks have launched, unless that needs the factor."""
        if factor is None and not self._is_split:
            return
        num_ready = self._flags.min(GRADS_READY) - self._num_begun()
        if num_ready <= 0:
            return
        with self._waits.meter.counted():
            for bucket, reduction_index in self._launched[:num_ready]:
                local_sum = self._sum_slice(bucket, reduction_index, factor)
                if self._sum_between_hosts is None:
                    self._finish(bucket, self._buffers.host_shard(local_sum))
                else:
                    self._between_hosts.append((bucket, self._sum_between_hosts(local_sum)))
            del self._launched[:num_ready]

    def _sum_slice(self, bucket: int, reduction_index: int | None, factor: float | None) -> Tensor:
        with self._waits.meter.reducing(reduction_index):
            local_sum = self._buffers.sum_slice(bucket)
            if not self._is_split and factor is not None and factor != 1.0:
                local_sum.mul_(factor)
        return local_sum

    def _finish_first(self) -> None:
        """Wait for the first sum between hosts."""
        bucket, result = self._between_hosts.popleft()
        self._finish(bucket, result.wait())

    def _finish(self, bucket: int, total: Tensor) -> None:
        if self._grad_shards is not None:
            self._grad_shards.accumulate(bucket, total)
        self._flags.increment(REDUCED)

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if factor != 1.0:
            shard = self.grad_shard(bucket)
            shard.flat[start - shard.start : stop - shard.start].mul_(factor)

    def reduce_shard(self, bucket: int) -> None:
        pass

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        return [self.grad_shard(bucket)] if self._is_split else self._buffers.views(bucket)

    def grad_shard(self, bucket: int) -> BucketSlice:
        shard = self._buffers.own_shard(bucket)
        return shard if self._grad_shards is None else shard._replace(flat=self._grad_shards.flats[bucket])

    def scale_grads(self, factor: float) -> None:
        self._buffers.scale_slices(factor)
        self._flags.increment(SCALED)
        self._waits.wait(SCALED, self._flags.counts[SCALED])

    def all_gather_grads(self, bucket: int) -> None:
        self._buffers.copy_from_peers(bucket)

    def end_step(self) -> None:
        self._launched.clear()
        if self._grad_shards is not None:
            self._grad_shards.begin_step()
        super().end_step()


class LazyReducer(_HostReducer):
    """See `GradReducer`: where a shard is used by its owner alone, it is summed when it is used.

    A range at a time then stays in the cache from the sum to the update.
    """

    def __init__(self, host: MappedHost, buffers: HostBuffers, between_hosts: InterHostReducer | None) -> None:
        super().__init__(host, buffers, between_hosts)
        self._is_shard_reduced = [False] * len(self.grad_buffers)

    def wait_reduce(self, bucket: int, factor: float) -> None:
        self._waits.wait(GRADS_READY, self._launch_numbers[bucket])

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        return self._flags.min(GRADS_READY) >= self._launch_numbers[bucket]

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if not self._is_shard_reduced[bucket]:
            self._buffers.sum_range(bucket, start, stop)
        if factor != 1.0:
            self.grad_buffers[bucket][start:stop].mul_(factor)

    def reduce_shard(self, bucket: int) -> None:
        if not self._is_shard_reduced[bucket]:
            self._buffers.sum_slice(bucket)
            self._is_shard_reduced[bucket] = True

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        return [self.grad_shard(bucket)]

    def scale_grads(self, factor: float) -> None:
        raise AssertionError("these sums rest split: the update scales them")

    def all_gather_grads(self, bucket: int) -> None:
        raise AssertionError("these sums rest split")

    def end_step(self) -> None:
        self._is_shard_reduced = [False] * len(self._is_shard_reduced)
        super().end_step()
