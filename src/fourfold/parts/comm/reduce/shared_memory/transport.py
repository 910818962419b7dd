"""Shared memory: the processes of one host reduce gradients without sending a message.

buffer  a rank's flat gradient of a bucket, in memory that all ranks of the host map; where it lies is in `layout`
slice   the part of every bucket that one rank sums, in rank order, into its own buffer
Law: a buffer is written only while no other rank may read it. A rank reads other ranks' buffers after GRADS_READY says
that they are complete, and other ranks' sums after REDUCED; no rank writes again before STEP_ENDED says that all have
read.

To sum, a rank reads its slice of all N buffers and writes one slice, 1/N of the bucket; the update then reads every
slice where its owner put it. Measured: `docs/measured.md`, "Collectives".
"""

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from fourfold.parts.comm.collectives import sum_in_order
from fourfold.parts.comm.reduce.async_result import AsyncResult
from fourfold.parts.comm.reduce.grad_shards import GradShards
from fourfold.parts.comm.reduce.inter_host import InterHostReducer
from fourfold.parts.comm.reduce.protocol import BucketSlice, unit_scale
from fourfold.parts.comm.reduce.shared_memory.call_check import CallCheck
from fourfold.parts.comm.reduce.shared_memory.flag_waits import FlagWaits
from fourfold.parts.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.parts.comm.reduce.shared_memory.layout import (
    CALL_BEGUN,
    GRADS_READY,
    REDUCED,
    SCALED,
    STEP_ENDED,
    SharedMemoryLayout,
    view_grad_buffers,
)
from fourfold.parts.comm.reduce.shared_memory.scalars import HostScalars
from fourfold.parts.comm.reduce.shared_memory.weights import HostWeights
from fourfold.plan.data.zero import RESTING_LAYOUTS, RestingLayouts
from fourfold.plan.sample_order import shard_range
from fourfold.words.layout import PARTIAL, SPLIT
from fourfold.words.trace_events import Recorder


class SharedMemoryTransport:
    """The transport between the processes of a host; see `Transport`. `inter_host` reaches the other hosts."""

    def __init__(
        self,
        mapping: mmap.mmap,
        layout: SharedMemoryLayout,
        host: HostRanks,
        *,
        rest: RestingLayouts = RESTING_LAYOUTS[0],
        inter_host: InterHostReducer | None = None,
        is_prereduced: bool = False,
        time_limit_seconds: float = 1800.0,
    ) -> None:
        self.name = "shared memory" + (" + gloo between hosts" if inter_host else "")
        self.index, self.size = host.index, host.size
        self.grad_scale_fn = unit_scale
        self._inter_host = inter_host
        # A codec has already summed between hosts: then this host's ranks add up to the sum over all hosts.
        self._reduces_inter_host = inter_host is not None and not is_prereduced
        self.replica_index = 0 if inter_host is None else inter_host.replica_index
        self._all_buffers = [view_grad_buffers(mapping, layout, region) for region in range(host.size)]
        self.grad_buffers: Sequence[torch.Tensor] = self._all_buffers[host.index]
        self.buffer_indices = layout.buffer_indices
        self._slices = [[_rank_slice(length, host.size, i) for i in range(host.size)] for length in layout.sizes]

        self._flags = HostFlags(mapping, layout.region_bytes, index=host.index, size=host.size)
        self._calls = CallCheck(mapping, layout, host, self._flags)
        self._waits = FlagWaits(self._flags, host, self._calls, time_limit_seconds=time_limit_seconds)
        self._scalars = HostScalars(mapping, layout, host, self._flags, self._waits, self._calls, inter_host)
        local_slices = [slices[host.index] for slices in self._slices]
        self._weights = HostWeights(mapping, layout, host, self._flags, self._waits, local_slices, inter_host)
        self.shared_weights, self.is_writer = self._weights.shared, self._weights.is_writer
        self.unshards_params = self._weights.unshards_params

        self._reduce_queue: list[tuple[int, int]] = []  # launched, not yet summed, in program order
        self._pending_inter_host: deque[tuple[int, AsyncResult]] = deque()  # summed here, on their way between hosts
        self._reduce_numbers = [0] * len(self.grad_buffers)  # the number of each bucket's last launch
        self._is_split = rest.state == SPLIT
        # A rank's own shard may be summed when it is used, a range at a time that stays in the cache.
        self._is_lazy = self._is_split and rest.gradient == PARTIAL and not self._reduces_inter_host
        self._is_shard_reduced = [False] * len(self.grad_buffers)
        num_hosts = inter_host.size if inter_host is not None else 1
        self._grad_shards = GradShards(self.grad_buffers, host.size * num_hosts) if rest.gradient == SPLIT else None

    @property
    def sent_bytes(self) -> float:
        return 0.0 if self._inter_host is None else self._inter_host.sent_bytes

    @property
    def waiting_seconds(self) -> float:
        return self._waits.waiting_seconds

    @property
    def recorder(self) -> Recorder:
        return self._waits.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._waits.recorder = recorder

    # ---- gradients ----------------------------------------------------------------------------------

    def acquire_buffer(self, bucket: int) -> None:
        self._waits.wait(STEP_ENDED, self._flags.counts[STEP_ENDED])
        if self._grad_shards is not None:
            last = self._last_reduce_of_buffer(bucket)
            self._reduce_through(last)
            self._waits.wait(REDUCED, last)

    def can_acquire_buffer(self, bucket: int) -> bool:
        last = self._last_reduce_of_buffer(bucket)
        self._advance_reductions()
        has_ended = self._flags.min(STEP_ENDED) >= self._flags.counts[STEP_ENDED]
        return has_ended and self._flags.min(REDUCED) >= last

    def _last_reduce_of_buffer(self, bucket: int) -> int:
        """The number of the last launch among the buckets that share this bucket's buffer."""
        index = self.buffer_indices[bucket]
        return max(n for n, each in zip(self._reduce_numbers, self.buffer_indices, strict=True) if each == index)

    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        self._reduce_queue.append((bucket, reduction_index))
        self._flags.increment(GRADS_READY)
        self._reduce_numbers[bucket] = self._flags.counts[GRADS_READY]
        if not self._is_lazy:
            self._reduce_ready()

    def wait_reduce(self, bucket: int) -> None:
        number = self._reduce_numbers[bucket]
        if self._is_lazy:
            self._waits.wait(GRADS_READY, number)
        elif self._num_reduced() < number:
            with self._waits.timed():
                self._reduce_through(number)
                if not self._is_split:
                    self._waits.wait(REDUCED, number)

    def is_reduced(self, bucket: int) -> bool:
        number = self._reduce_numbers[bucket]
        if self._is_lazy:
            return self._flags.min(GRADS_READY) >= number
        self._advance_reductions()
        return self._num_reduced() >= number

    def _num_reduced(self) -> int:
        """How many reductions are done as far as this rank needs them: its own slices, or all ranks'."""
        return self._flags.counts[REDUCED] if self._is_split else self._flags.min(REDUCED)

    def _advance_reductions(self) -> None:
        """Do this rank's part of reductions, as far as that needs no wait."""
        self._reduce_ready()
        while self._pending_inter_host and self._pending_inter_host[0][1].is_done():
            self._reduce_through(self._flags.counts[REDUCED] + 1)

    def _reduce_through(self, number: int) -> None:
        """Do this rank's part of the first `number` reductions."""
        while self._flags.counts[REDUCED] < number:
            self._reduce_ready()
            if self._pending_inter_host:
                # Before any wait for a later launch: the rank that is to launch it may be waiting for this sum.
                bucket, result = self._pending_inter_host.popleft()
                self._finish_reduce(bucket, result.wait())
            elif self._flags.counts[REDUCED] < number:
                self._waits.wait(GRADS_READY, self._num_begun() + 1)

    def _num_begun(self) -> int:
        """How many launches this rank has begun to sum."""
        return self._flags.counts[GRADS_READY] - len(self._reduce_queue)

    def _reduce_ready(self) -> None:
        """Sum this rank's slice of every bucket that all ranks have launched."""
        begin = time.perf_counter()
        num_ready = max(0, self._flags.min(GRADS_READY) - self._num_begun())
        for bucket, reduction_index in self._reduce_queue[:num_ready]:
            with self._waits.recorder.reducing(reduction_index):
                local_sum = self._sum_range(bucket, *self._slices[bucket][self.index])
                if not self._is_split and (factor := self.grad_scale_fn()) != 1.0:
                    local_sum.mul_(factor)
            if self._inter_host is None or not self._reduces_inter_host:
                self._finish_reduce(bucket, self._host_shard(local_sum))
            else:
                reduce = self._inter_host.reduce_scatter_async if self._is_split else self._inter_host.all_reduce_async
                self._pending_inter_host.append((bucket, reduce(local_sum)))
        del self._reduce_queue[:num_ready]
        self._waits.waiting_seconds += time.perf_counter() - begin

    def _host_shard(self, local_sum: torch.Tensor) -> torch.Tensor:
        """This host's shard of this rank's slice."""
        if self._inter_host is None:
            return local_sum
        return local_sum[slice(*shard_range(0, local_sum.numel(), self._inter_host.size, self._inter_host.index))]

    def _finish_reduce(self, bucket: int, total: torch.Tensor) -> None:
        if self._grad_shards is not None:
            self._grad_shards.accumulate(bucket, total)
        self._flags.increment(REDUCED)

    def _sum_range(self, bucket: int, start: int, stop: int) -> torch.Tensor:
        """The sum of [start, stop) over this host's ranks, in this rank's buffer."""
        addends = [buffers[bucket][start:stop] for buffers in self._all_buffers]
        sum_in_order(addends, out=addends[self.index])
        return addends[self.index]

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if self._is_lazy and not self._is_shard_reduced[bucket]:
            self._sum_range(bucket, start, stop)
        if factor != 1.0:
            shard = self.grad_shard(bucket)
            shard.flat[start - shard.start : stop - shard.start].mul_(factor)

    def reduce_shard(self, bucket: int) -> None:
        if self._is_lazy and not self._is_shard_reduced[bucket]:
            self._sum_range(bucket, *self._slices[bucket][self.index])
            self._is_shard_reduced[bucket] = True

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        if self._is_split:
            return [self.grad_shard(bucket)]
        return [
            BucketSlice(start, stop, self._all_buffers[peer][bucket][start:stop])
            for peer, (start, stop) in enumerate(self._slices[bucket])
            if stop > start
        ]

    def grad_shard(self, bucket: int) -> BucketSlice:
        start, stop = self._slices[bucket][self.index]
        if self._inter_host is not None:
            start, stop = shard_range(start, stop, self._inter_host.size, self._inter_host.index)
        flat = self.grad_buffers[bucket][start:stop] if self._grad_shards is None else self._grad_shards.flats[bucket]
        return BucketSlice(start, stop, flat)

    def scale_grads(self, factor: float) -> None:
        for buffer, slices in zip(self.grad_buffers, self._slices, strict=True):
            start, stop = slices[self.index]
            buffer[start:stop].mul_(factor)
        self._flags.increment(SCALED)
        self._waits.wait(SCALED, self._flags.counts[SCALED])

    def all_gather_grads(self, bucket: int) -> None:
        for peer, (start, stop) in enumerate(self._slices[bucket]):
            if peer != self.index:
                self.grad_buffers[bucket][start:stop].copy_(self._all_buffers[peer][bucket][start:stop])

    def end_step(self) -> None:
        self._weights.finish_own_gathers()
        self._reduce_queue.clear()
        self._is_shard_reduced = [False] * len(self._is_shard_reduced)
        if self._grad_shards is not None:
            self._grad_shards.begin_step()
        self._flags.increment(STEP_ENDED)
        # Once every rank has published its slices, the weights are whole.
        self._weights.wait_all()

    # ---- weights ------------------------------------------------------------------------------------

    def signal_backward_done(self) -> None:
        self._weights.signal_backward_done()

    def wait_weights_writable(self) -> None:
        self._weights.wait_writable()

    def all_gather_weights_async(self, bucket: int, weight: torch.Tensor) -> None:
        self._weights.all_gather_async(bucket, weight)

    def wait_weights(self, bucket: int) -> None:
        self._weights.wait(bucket)

    def unshard_async(self, bucket: int, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        return self._weights.unshard_async(bucket, shard, out)

    def broadcast_weights(self) -> None:
        self._weights.broadcast()

    # ---- scalars and calls --------------------------------------------------------------------------

    def all_reduce_scalars_async(self, kind: int, values: torch.Tensor) -> None:
        self._scalars.all_reduce_async(kind, values)

    def wait_scalars(self, kind: int) -> list[float]:
        return self._scalars.wait(kind)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._inter_host is not None
        with self._waits.timed():
            return self._inter_host.all_gather_ints(row)

    def begin_call(self, call: str) -> None:
        self._calls.begin(call)

    def check_same_call(self) -> None:
        self._waits.wait(CALL_BEGUN, self._flags.counts[CALL_BEGUN])
        self._calls.compare()
        if self._inter_host is not None:
            self._inter_host.all_reduce_scalars([], self._calls.call)


def _rank_slice(length: int, size: int, index: int) -> tuple[int, int]:
    """[start, stop) of a rank's slice; cut at multiples of 32 elements, so that no cache line has two writers."""
    blocks = -(-length // 32)
    return min(length, blocks * index // size * 32), min(length, blocks * (index + 1) // size * 32)
