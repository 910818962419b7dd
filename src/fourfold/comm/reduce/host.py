"""Host reductions: gradients and weights of a host's ranks, over one mapping of its memory; between hosts over gloo.

slice   the part of every bucket that one rank sums in rank order, updates, or brings from other hosts
number  of a launch: the how-manieth it is since the start, and the count that GRADS_READY and REDUCED reach by it

gradients  a rank's flat gradient of a bucket lies in memory that all ranks of the host map (`host_memory.py`)
    queue      the sums that this rank has begun and not all ranks are known to have begun, in order
weights    exist once per host
    published  this rank has updated its slice of a bucket; other hosts may still have to send theirs
staging    of weights that rest split between hosts: buffers with room for a whole bucket, used in rotation
    staged     this rank's slice has come from all hosts
    copied     this rank has copied the bucket to where it needs it

Law: one mapping has one set of flags; its parts use different ones.
Law: a buffer of gradients is written only while no other rank may read it. A rank reads other ranks' buffers after
GRADS_READY says that they are complete, and other ranks' sums after REDUCED; no rank writes again before STEP_ENDED
says that all have read. No cache line of a buffer is written by two ranks.
Law: weights are written only after all ranks of the host have ended backward, and read only after every rank has
published its slice. A staging buffer is written again only after every rank has copied what was there.
Law: ranks add in rank order, so every rank has the same bits. Between hosts sums pair up by order, so they begin there
in the order of the queue, whichever is asked for first.

To sum, a rank reads its slice of all N buffers and writes one slice, 1/N of the bucket; the update then reads every
slice where its owner put it. Measured: `docs/measured-notes.md`, "Collectives". Between hosts each rank brings one
slice, so a bucket crosses the network once per host and not once per rank.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fourfold.axes.data.rules.unshard_order import NUM_STAGING_BUFFERS
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, RestingLayouts
from fourfold.comm.collectives import Work, sum_in_order
from fourfold.comm.reduce.group import GradShards, ShardedCollectives
from fourfold.comm.reduce.host_memory import (
    BACKWARD_DONE,
    COPIED,
    GRADS_READY,
    REDUCED,
    SCALED,
    STAGED,
    STEP_ENDED,
    WEIGHTS_READY,
    HostMemory,
)
from fourfold.comm.reduce.protocol import BucketSlice, DataTransport, GradReducer, scale_range
from fourfold.comm.reduce.scalars import GroupSums, ScalarReducer
from fourfold.orders.sample_order import shard_range
from fourfold.words.layout import PARTIAL, SPLIT

# ---- gradient buffers of all ranks ---------------------------------------------------------------------------------


class HostBuffers:
    """The buffers by rank and bucket, and the slices of each bucket by rank.

    `num_hosts` and `host_index`: of the hosts that split what the ranks of one host sum.
    """

    def __init__(self, host: HostMemory, *, num_hosts: int = 1, host_index: int = 0) -> None:
        size = host.size
        self._all = [host.grad_buffers(region) for region in range(size)]
        self._index, self._num_hosts, self._host_index = host.index, num_hosts, host_index
        self.own: Sequence[Tensor] = self._all[self._index]
        """This rank's buffer of each bucket."""
        self._slices = [[_rank_slice(length, size, i) for i in range(size)] for length in host.layout.sizes]
        self.own_slices = [slices[self._index] for slices in self._slices]
        """[start, stop) of this rank's slice of each bucket, in elements."""
        self.num_shards = size * num_hosts

    def sum_range(self, bucket: int, start: int, stop: int) -> Tensor:
        """The sum of [start, stop) over this host's ranks, in this rank's buffer."""
        addends = [buffers[bucket][start:stop] for buffers in self._all]
        sum_in_order(addends, out=addends[self._index])
        return addends[self._index]

    def sum_slice(self, bucket: int) -> Tensor:
        """The sum of this rank's slice."""
        return self.sum_range(bucket, *self.own_slices[bucket])

    def host_shard(self, local_sum: Tensor) -> Tensor:
        """This host's shard of this rank's slice."""
        return local_sum[slice(*shard_range(0, local_sum.numel(), self._num_hosts, self._host_index))]

    def own_shard(self, bucket: int) -> BucketSlice:
        """This rank's shard of the bucket: of its slice, what is this host's."""
        start, stop = shard_range(*self.own_slices[bucket], self._num_hosts, self._host_index)
        return BucketSlice(start, stop, self.own[bucket][start:stop])

    def views(self, bucket: int) -> Sequence[BucketSlice]:
        """Every rank's slice of a bucket, where that rank puts the sum."""
        return [
            BucketSlice(start, stop, self._all[peer][bucket][start:stop])
            for peer, (start, stop) in enumerate(self._slices[bucket])
            if stop > start
        ]

    def scale_slices(self, factor: float) -> None:
        """Multiply this rank's slice of every bucket."""
        for buffer, (start, stop) in zip(self.own, self.own_slices, strict=True):
            buffer[start:stop].mul_(factor)

    def copy_from_peers(self, bucket: int) -> None:
        """Copy the other ranks' slices into this rank's buffer."""
        for peer, (start, stop) in enumerate(self._slices[bucket]):
            if peer != self._index:
                self.own[bucket][start:stop].copy_(self._all[peer][bucket][start:stop])


def _rank_slice(length: int, size: int, index: int) -> tuple[int, int]:
    """[start, stop) of a rank's slice; cut at multiples of 32 elements, so that no cache line has two writers."""
    blocks = -(-length // 32)
    return min(length, blocks * index // size * 32), min(length, blocks * (index + 1) // size * 32)


# ---- weights -------------------------------------------------------------------------------------------------------


class HostWeights:
    """See `WeightGatherer`. `slices`: [start, stop) of this rank's slice of each bucket, in elements."""

    def __init__(
        self, host: HostMemory, slices: Sequence[tuple[int, int]], between_hosts: ShardedCollectives | None
    ) -> None:
        self._host, self._slices, self._between_hosts = host, slices, between_hosts
        self.size = host.size * (1 if between_hosts is None else between_hosts.num_members)
        self._pending_gathers: deque[Work | None] = deque()  # published, not yet complete on this host
        self._gather_numbers = [0] * len(slices)  # the number of each bucket's last publication
        self.shared_weights: Sequence[Tensor] | None = host.weights() if host.layout.weights_bytes else None
        self.is_writer = host.index == 0 or self.shared_weights is None
        self.unshards_params = host.layout.staging_bytes > 0

    def signal_backward_done(self) -> None:
        self._host.increment(BACKWARD_DONE)

    def wait_writable(self) -> None:
        if self.shared_weights is not None:
            self._host.wait_own(BACKWARD_DONE)

    def can_gather(self) -> bool:
        return True

    def all_gather_async(self, bucket: int, weight: Tensor) -> None:
        work = None
        if self._between_hosts is not None and self._between_hosts.size > 1:
            work = self._between_hosts.all_gather_inplace_async(weight[slice(*self._slices[bucket])])
        self._pending_gathers.append(work)
        self._gather_numbers[bucket] = self._host.counts[WEIGHTS_READY] + len(self._pending_gathers)
        if work is None:
            self._gather_through(self._gather_numbers[bucket])

    def wait(self, bucket: int) -> None:
        # Earlier buckets too, in program order: a rank of another host may be waiting for one of them.
        self._gather_through(self._gather_numbers[bucket])
        self._host.wait(WEIGHTS_READY, self._gather_numbers[bucket])

    def end_step(self) -> None:
        self._gather_through(self._host.counts[WEIGHTS_READY] + len(self._pending_gathers))
        # Once every rank of the host has published as much as this one, the weights are whole.
        self._host.wait_own(WEIGHTS_READY)

    def _gather_through(self, number: int) -> None:
        """Complete this rank's first `number` publications in this host's memory, raising the flag after each."""
        while self._host.counts[WEIGHTS_READY] < number:
            if (work := self._pending_gathers.popleft()) is not None:
                work.wait()
            self._host.increment(WEIGHTS_READY)

    def broadcast(self) -> None:
        if self._between_hosts is not None and self.is_writer:
            for flat in self.shared_weights or ():
                self._between_hosts.broadcast(flat)


class HostUnsharder:
    """See `WeightUnsharder`. Every rank of the host brings its slice of a bucket from all hosts, for all of them.

    `slices`: [start, stop) of this rank's slice of each bucket, in elements. Waits are called in the order of gathers.
    """

    def __init__(self, host: HostMemory, slices: Sequence[tuple[int, int]], between_hosts: ShardedCollectives) -> None:
        self._host, self._slices, self._between_hosts = host, slices, between_hosts
        self._buffers = host.staging_buffers()
        self._num_begun = 0

    def unshard_async(self, bucket: int, shard: Tensor, out: Tensor, unshard_index: int | None) -> Callable[[], None]:
        host, end_span = self._host, self._host.meter.unsharding(unshard_index)
        self._num_begun += 1
        number = self._num_begun
        host.wait(COPIED, number - NUM_STAGING_BUFFERS)
        buffer = self._buffers[number % NUM_STAGING_BUFFERS][: out.nbytes].view(out.dtype)
        work = self._between_hosts.all_gather_async(shard, buffer[slice(*self._slices[bucket])])

        def wait() -> None:
            with host.meter.timed():
                work.wait()
                host.increment(STAGED)
                host.wait(STAGED, number)
                out.copy_(buffer)
                host.increment(COPIED)
            end_span()

        return wait

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        with self._host.meter.timed():
            return self._between_hosts.all_gather_ints(row)


# ---- reduction -----------------------------------------------------------------------------------------------------


class _HostReducer:
    """What `EagerReducer` and `LazyReducer` have in common; see `GradReducer`."""

    def __init__(self, host: HostMemory, buffers: HostBuffers, between_hosts: ShardedCollectives | None) -> None:
        self._host, self._buffers = host, buffers
        self.size = host.size * (1 if between_hosts is None else between_hosts.num_members)
        self.replica_index = 0 if between_hosts is None else between_hosts.replica_index
        self.grad_buffers, self.buffer_indices = buffers.own, host.layout.buffer_indices
        self._launch_numbers = [0] * len(self.grad_buffers)
        """The number of each bucket's last launch."""

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        self._host.wait_own(STEP_ENDED)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return self._host.min(STEP_ENDED) >= self._host.counts[STEP_ENDED]

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        self._host.increment(GRADS_READY)
        self._launch_numbers[bucket] = self._host.counts[GRADS_READY]

    def grad_shard(self, bucket: int) -> BucketSlice:
        return self._buffers.own_shard(bucket)

    def end_step(self) -> None:
        self._host.increment(STEP_ENDED)


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
        host: HostMemory,
        buffers: HostBuffers,
        between_hosts: ShardedCollectives | None,
        *,
        rest: RestingLayouts,
        is_prereduced: bool,
    ) -> None:
        super().__init__(host, buffers, between_hosts)
        self._is_split = rest.state == SPLIT
        self._grad_shards = GradShards(self.grad_buffers, buffers.num_shards) if rest.gradient == SPLIT else None
        self._sum_between_hosts: Callable[[Tensor], Work] | None = None
        if between_hosts is not None and not is_prereduced:
            self._sum_between_hosts = (
                between_hosts.reduce_scatter_async if self._is_split else between_hosts.all_reduce_async
            )
        self._launched: list[_Launch] = []  # in program order
        self._between_hosts: deque[tuple[int, Work]] = deque()  # summed here, on their way between hosts

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        super().acquire_buffer(bucket, factor)
        if self._grad_shards is not None:
            last = self._last_launch_of_buffer(bucket)
            self._reduce_through(last, factor)
            self._host.wait(REDUCED, last)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        self._advance(factor)
        is_read = self._grad_shards is None or self._host.min(REDUCED) >= self._last_launch_of_buffer(bucket)
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
            with self._host.meter.timed():
                self._reduce_through(number, factor)
                if not self._is_split:
                    self._host.wait(REDUCED, number)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        self._advance(factor)
        return self._num_reduced() >= self._launch_numbers[bucket]

    def _num_reduced(self) -> int:
        """How many reductions are done as far as this rank needs them: its own slices, or all ranks'."""
        return self._host.counts[REDUCED] if self._is_split else self._host.min(REDUCED)

    def _advance(self, factor: float | None) -> None:
        """Do this rank's part of reductions, as far as that needs no wait."""
        self._sum_ready(factor)
        while self._between_hosts and self._between_hosts[0][1].is_completed():
            self._finish_first()

    def _reduce_through(self, number: int, factor: float | None) -> None:
        """Do this rank's part of the first `number` reductions."""
        assert factor is not None or self._is_split
        while self._host.counts[REDUCED] < number:
            self._sum_ready(factor)
            if self._between_hosts:
                # Before any wait for a later launch: the rank that is to launch it may be waiting for this sum.
                self._finish_first()
            elif self._host.counts[REDUCED] < number:
                self._host.wait(GRADS_READY, self._num_begun() + 1)

    def _num_begun(self) -> int:
        """How many launches this rank has begun to sum."""
        return self._host.counts[GRADS_READY] - len(self._launched)

    def _sum_ready(self, factor: float | None) -> None:
        """Sum this rank's slice of every bucket that all ranks have launched, unless that needs the factor."""
        if factor is None and not self._is_split:
            return
        num_ready = self._host.min(GRADS_READY) - self._num_begun()
        if num_ready <= 0:
            return
        with self._host.meter.counted():
            for bucket, reduction_index in self._launched[:num_ready]:
                local_sum = self._sum_slice(bucket, reduction_index, factor)
                if self._sum_between_hosts is None:
                    self._finish(bucket, self._buffers.host_shard(local_sum))
                else:
                    self._between_hosts.append((bucket, self._sum_between_hosts(local_sum)))
            del self._launched[:num_ready]

    def _sum_slice(self, bucket: int, reduction_index: int | None, factor: float | None) -> Tensor:
        with self._host.meter.reducing(reduction_index):
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
        self._host.increment(REDUCED)

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        scale_range(self.grad_shard(bucket), start, stop, factor)

    def reduce_shard(self, bucket: int) -> None:
        pass

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        return [self.grad_shard(bucket)] if self._is_split else self._buffers.views(bucket)

    def grad_shard(self, bucket: int) -> BucketSlice:
        shard = self._buffers.own_shard(bucket)
        return shard if self._grad_shards is None else shard._replace(flat=self._grad_shards.flats[bucket])

    def scale_grads(self, factor: float) -> None:
        self._buffers.scale_slices(factor)
        self._host.increment(SCALED)
        self._host.wait_own(SCALED)

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

    def __init__(self, host: HostMemory, buffers: HostBuffers, between_hosts: ShardedCollectives | None) -> None:
        super().__init__(host, buffers, between_hosts)
        self._is_shard_reduced = [False] * len(self.grad_buffers)

    def wait_reduce(self, bucket: int, factor: float) -> None:
        self._host.wait(GRADS_READY, self._launch_numbers[bucket])

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        return self._host.min(GRADS_READY) >= self._launch_numbers[bucket]

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
    host: HostMemory,
    *,
    rest: RestingLayouts = RESTING_LAYOUTS[0],
    between_hosts: ShardedCollectives | None = None,
    scalars_between_hosts: GroupSums | None = None,
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
    weights, unsharder = HostWeights(host, buffers.own_slices, between_hosts), None
    if weights.unshards_params and between_hosts is not None:
        unsharder = HostUnsharder(host, buffers.own_slices, between_hosts)
    num_scalars = host.layout.num_scalars
    scalars = ScalarReducer(num_scalars, host if num_scalars else None, scalars_between_hosts)
    return DataTransport(grads, weights, scalars, description, unsharder)
