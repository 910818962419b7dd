"""Host transport: gradients, weights and scalars of a host's ranks, over one mapping of its memory.

slice   the part of every bucket that one rank sums in rank order, updates, or brings from other hosts
number  of a launch: the how-manieth it is since the start, and the count that GRADS_READY and REDUCED reach by it

gradients  a rank's flat gradient of a bucket lies in memory that all ranks of the host map (`layout.py`)
    queue      the sums that this rank has begun and not all ranks are known to have begun, in order
weights    exist once per host
    published  this rank has updated its slice of a bucket; other hosts may still have to send theirs
staging    of weights that rest split between hosts: buffers with room for a whole bucket, used in rotation
    staged     this rank's slice has come from all hosts
    copied     this rank has copied the bucket to where it needs it
scalars    sums of a few numbers; each kind (LOSS, GRAD_NORM, …) has a flag and room of its own

Law: one mapping has one set of flags; its parts use different ones.
Law: a buffer of gradients is written only while no other rank may read it. A rank reads other ranks' buffers after
GRADS_READY says that they are complete, and other ranks' sums after REDUCED; no rank writes again before STEP_ENDED
says that all have read.
Law: weights are written only after all ranks of the host have ended backward, and read only after every rank has
published its slice. A staging buffer is written again only after every rank has copied what was there.
Law: ranks add in rank order, so every rank has the same bits. Between hosts sums pair up by order, so they begin there
in the order of the queue, whichever is asked for first.

To sum, a rank reads its slice of all N buffers and writes one slice, 1/N of the bucket; the update then reads every
slice where its owner put it. Measured: `docs/measured-notes.md`, "Collectives". Between hosts each rank brings one
slice, so a bucket crosses the network once per host and not once per rank.
"""

import functools
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.axes.data.rules.unshard_order import NUM_STAGING_BUFFERS
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, RestingLayouts
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.inter_host import InterHostReducer, InterHostScalars
from fourfold.comm.reduce.process_group import GradShards
from fourfold.comm.reduce.protocol import BucketSlice, DataTransport, GradReducer, WorldChannel, check_room
from fourfold.comm.reduce.sharded_collectives import AsyncResult, always_done
from fourfold.comm.reduce.shared_memory.call_check import CallCheck, HostCalls
from fourfold.comm.reduce.shared_memory.flag_waits import (
    TIME_LIMIT_SECONDS,
    FlagWaits,
    MappedHost,
)
from fourfold.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.comm.reduce.shared_memory.host_buffers import HostBuffers
from fourfold.comm.reduce.shared_memory.layout import (
    BACKWARD_DONE,
    COPIED,
    GRADS_READY,
    REDUCED,
    SCALARS_READY,
    SCALED,
    STAGED,
    STEP_ENDED,
    WEIGHTS_READY,
    SharedMemoryLayout,
    view_scalars,
    view_staging_buffers,
    view_weights,
)
from fourfold.comm.reduce.single_rank import LocalScalars
from fourfold.words.layout import PARTIAL, SPLIT
from fourfold.words.program import LOSS

# ---- staging -------------------------------------------------------------------------------------------------------


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


# ---- weights -------------------------------------------------------------------------------------------------------


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


# ---- scalars -------------------------------------------------------------------------------------------------------


class _QueuedSum(NamedTuple):
    """A sum that this rank has begun, of `length` values. A rank whose flag has reached `number` has begun it too."""

    kind: int
    number: int
    length: int


class HostScalars:
    """See `ScalarReducer`. `calls`: compared with the LOSS; None for other scalars than those of the world."""

    def __init__(
        self, host: MappedHost, between_hosts: InterHostScalars | None, calls: CallCheck | None = None
    ) -> None:
        self._values = [view_scalars(host.mapping, host.layout, region) for region in range(host.ranks.size)]
        self._index, self._flags, self._waits = host.ranks.index, host.flags, host.waits
        self._capacity = host.layout.num_scalars
        self._between_hosts, self._calls = between_hosts, calls
        self._queue: deque[_QueuedSum] = deque()
        self._sums: dict[int, AsyncResult] = {}

    def all_reduce_async(self, kind: int, values: Tensor) -> None:
        check_room(values, self._capacity)
        flag = SCALARS_READY + kind
        self._values[self._index][kind, self._flags.counts[flag] % 2, : len(values)] = values
        self._flags.increment(flag)
        self._queue.append(_QueuedSum(kind, self._flags.counts[flag], len(values)))

    def is_ready(self, kind: int) -> bool:
        while self._queue and self._flags.min(SCALARS_READY + self._queue[0].kind) >= self._queue[0].number:
            self._add_up_first()
        return kind in self._sums and self._sums[kind].is_done()

    def wait(self, kind: int) -> list[float]:
        # One rank may need the loss while it reduces gradients, another only after other scalars.
        while kind not in self._sums:
            first = self._queue[0]
            self._waits.wait(SCALARS_READY + first.kind, first.number)
            self._add_up_first()
        if self._calls is not None and kind == LOSS:
            self._calls.check_begun(None)
        return self._sums.pop(kind).wait()

    def _add_up_first(self) -> None:
        """Add up the first sum of the queue, which all ranks of the host have begun; begin to add up hosts."""
        kind, number, length = self._queue.popleft()
        rows = [values[kind, (number - 1) % 2, :length] for values in self._values]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        if self._between_hosts is None:
            self._sums[kind] = AsyncResult(total.tolist, always_done)
        else:
            call = self._calls.call if self._calls is not None and kind == LOSS else None
            self._sums[kind] = self._between_hosts.all_reduce_async(total, call)


# ---- reduction -----------------------------------------------------------------------------------------------------


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


# ---- host transport ------------------------------------------------------------------------------------------------


def make_host_transport(
    host: MappedHost,
    *,
    rest: RestingLayouts = RESTING_LAYOUTS[0],
    between_hosts: InterHostReducer | None = None,
    scalars_between_hosts: InterHostScalars | None = None,
    is_prereduced: bool = False,
) -> DataTransport:
    """The transport of the ranks of a host, and of the same ranks on other hosts."""
    num_hosts, host_index = (1, 0) if between_hosts is None else (between_hosts.size, between_hosts.index)
    buffers = HostBuffers(host, num_hosts=num_hosts, host_index=host_index)
    grads: GradReducer
    sums_elsewhere = between_hosts is not None and not is_prereduced
    if rest.state == SPLIT and rest.gradient == PARTIAL and not sums_elsewhere:
        grads = LazyReducer(host, buffers, between_hosts)
    else:
        grads = EagerReducer(host, buffers, between_hosts, rest=rest, is_prereduced=is_prereduced)
    description = "shared memory" + (" + gloo between hosts" if between_hosts else "")
    weights = HostWeights(host, buffers.own_slices, between_hosts)
    scalars = HostScalars(host, scalars_between_hosts) if host.layout.num_scalars else LocalScalars(0)
    return DataTransport(grads, weights, scalars, description)


def make_host_world(
    mapping: mmap.mmap,
    layout: SharedMemoryLayout,
    ranks: HostRanks,
    meter: CommMeter,
    between_hosts: InterHostScalars | None = None,
    *,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> WorldChannel:
    """The channel of a world whose ranks share memory on every host."""
    flags = HostFlags(mapping, layout.region_bytes, index=ranks.index, size=ranks.size)
    check = CallCheck(mapping, layout, ranks, flags)
    waits = FlagWaits(flags, ranks, check, meter, time_limit_seconds=time_limit_seconds)
    scalars = HostScalars(MappedHost(mapping, layout, ranks, flags, waits), between_hosts, check)
    return WorldChannel(scalars, HostCalls(check, flags, waits, between_hosts))
