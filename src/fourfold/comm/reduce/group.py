"""Group reductions: buckets over process groups: gloo between processes and hosts, NCCL on GPUs; or of one rank alone.

pending  collectives that have begun and not been waited for, in program order
round    one reduction of all buckets; a step that accumulates gradients has several
shard    the index-th of `size` equal parts of a flat tensor
replica  ranks that hold all shards among them; the ranks of one shard index then sum it over the replicas
Law: every rank begins the same collectives of one group in the same order, with at most MAX_REDUCTIONS_IN_FLIGHT
pending.
Law: of one rank alone a bucket's sum is its gradient, its weights are whole; nothing waits and nothing is sent.
Law: addends are added in rank order, ((0 + 1) + 2) + …, whichever rank adds.

Over gloo a reduce-scatter is an all-to-all and a sum: gloo's own moves as many bytes as its all-reduce and takes 1.3
to 2.3 times as long (`docs/measured-notes.md`).
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.axes.data.rules.zero import ShardGroups
from fourfold.comm.collectives import Group, Work, all_gather_rows, ring_bytes, sum_in_order
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import (
    BucketSlice,
    DataTransport,
    GradReducer,
    GradsOfBucket,
    TransportSpec,
    WeightGatherer,
    scale_range,
)
from fourfold.comm.reduce.scalars import GroupSums, ScalarReducer
from fourfold.plan.memory import MAX_REDUCTIONS_IN_FLIGHT
from fourfold.torch_kit import memory
from fourfold.words.layout import SPLIT, WHOLE, Change
from fourfold.words.program import Verb

# ---- sums that rest whole ------------------------------------------------------------------------------------------


class WholeReducer:
    """See `GradReducer`: sums that rest whole, each in one flat that is this rank's own.

    all_reduce        begins to sum a buffer over the ranks, in place; None: there is one rank
    index             this rank's among them
    unbucketed_grads  a bucket's gradients, where there is one rank and they have no buffers; the caller then keeps them
                      and launches nothing
    """

    replica_index = 0

    def __init__(
        self,
        grad_buffers: Sequence[Tensor],
        buffer_indices: tuple[int, ...],
        meter: CommMeter,
        *,
        all_reduce: Callable[[Tensor], Work] | None = None,
        index: int = 0,
        size: int = 1,
        unbucketed_grads: GradsOfBucket | None = None,
    ) -> None:
        self.grad_buffers, self.buffer_indices, self.size = grad_buffers, buffer_indices, size
        self._meter, self._all_reduce, self._index, self._num_parts = meter, all_reduce, index, size
        self._unbucketed_grads = unbucketed_grads
        self._pending = self._never_launched()
        """Sums that have not been waited for, and multiplied by the factor."""

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        # A sum that was not waited for is still in its own buffer.
        if self._all_reduce is not None and bucket in self._pending:
            assert factor is not None, "this buffer is free once its sum is made, which needs the factor"
            self.wait_reduce(bucket, factor)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return self._all_reduce is None or self.is_reduced(bucket, factor)

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        if self._all_reduce is None:
            self._pending[bucket] = ALONE
            return
        work = self._pending[bucket] = self._all_reduce(self.grad_buffers[bucket])
        self._meter.record_async(Verb.REDUCE, reduction_index, work.get_future)

    def wait_reduce(self, bucket: int, factor: float) -> None:
        work = self._pending.pop(bucket, None)
        if work is None:
            return
        if work is not ALONE:
            with self._meter.timed():
                work.wait()
        if factor != 1.0:
            self._scale_bucket(bucket, factor)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        return bucket not in self._pending or (factor is not None and self._pending[bucket].is_completed())

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        raise AssertionError("these sums rest whole: they are scaled when they are made")

    def reduce_shard(self, bucket: int) -> None:
        pass

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        flat = self.grad_buffers[bucket]
        return [BucketSlice(0, flat.numel(), flat)]

    def grad_shard(self, bucket: int) -> BucketSlice:
        """An equal part for each rank."""
        flat = self.grad_buffers[bucket]
        start, stop = (flat.numel() * (self._index + step) // self._num_parts for step in (0, 1))
        return BucketSlice(start, stop, flat[start:stop])

    def scale_grads(self, factor: float) -> None:
        for bucket in range(len(self.buffer_indices)):
            self._scale_bucket(bucket, factor)

    def _scale_bucket(self, bucket: int, factor: float) -> None:
        for flat in [self.grad_buffers[bucket]] if self._unbucketed_grads is None else self._unbucketed_grads(bucket):
            flat.mul_(factor)

    def all_gather_grads(self, bucket: int) -> None:
        pass

    def end_step(self) -> None:
        if self._all_reduce is None:
            self._pending = self._never_launched()

    def _never_launched(self) -> dict[int, Work]:
        return {} if self._unbucketed_grads is None else dict.fromkeys(range(len(self.buffer_indices)), ALONE)


def _own(flat: Tensor) -> Work:
    """The reduction of one rank alone, or one that a codec has done already."""
    return Work(lambda: flat)


ALONE = Work(lambda: None)


class LocalSGDReducer(WholeReducer):
    """See `GradReducer`: that of one rank, over the buffers of the reducer that joins all ranks.

    With local steps ranks train on their own gradients, and sync every few steps: they sum what they put into their
    buffers, after the same number of steps. Outside of a sync no rank reads or sends gradients or weights of others.
    """

    def __init__(self, joined: GradReducer) -> None:
        super().__init__(joined.grad_buffers, joined.buffer_indices, CommMeter())
        self._joined, self.size = joined, joined.size
        self._is_syncing = False

    def all_reduce_async(self, bucket: int) -> None:
        """This rank's addend is in its buffer: begin to sum it over all ranks. Does not wait."""
        self._is_syncing = True
        self._joined.reduce_async(bucket, None, 1.0)

    def wait_all_reduce(self, bucket: int) -> Sequence[BucketSlice]:
        """Wait for a bucket's sum; returns where it lies until `end_step`."""
        self._joined.wait_reduce(bucket, 1.0)
        return self._joined.reduced_views(bucket)

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        # Other ranks may still read what this rank put there for the last sync.
        self._joined.acquire_buffer(bucket, 1.0)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return self._joined.can_acquire_buffer(bucket, 1.0)

    def end_step(self) -> None:
        super().end_step()
        if self._is_syncing:
            self._joined.end_step()
            self._is_syncing = False


# ---- sharded collectives -------------------------------------------------------------------------------------------


class _TwoStageReduce:
    """A sum over one replica's ranks, then over the replicas. Second stages begin in the order of the first ones.

    Each wait and each `is_completed` also starts the second stages of earlier reductions: other ranks may wait for
    them.
    """

    def __init__(self, first: Work, replica_group: Group, queue: "deque[_TwoStageReduce]") -> None:
        self._first, self._replica_group, self._queue = first, replica_group, queue
        self._second: Work | None = None

    def _start_next_stage(self) -> None:
        head = self._queue.popleft()
        head._second = head._replica_group.all_reduce(head._first.wait())

    def is_completed(self) -> bool:
        while self._second is None:
            if not self._queue[0]._first.is_completed():
                return False
            self._start_next_stage()
        return self._second.is_completed()

    def wait(self) -> Tensor:
        while self._second is None:
            self._start_next_stage()
        return self._second.wait()


class ShardedCollectives:
    """Some ranks, among which flat tensors are split: all of a communicator, or one of each host.

    Every rank must begin the same collectives in the same order. Reductions and gathers have a process group each, so
    each has an order of its own: an update inside backward may gather before or after the next reduction begins.

    num_members    how many ranks there are
    size, index    of those that hold all shards among them, and this rank's among these
    replica_index  which of those that hold all shards this rank is one of
    """

    def __init__(
        self,
        comm: Communicator,
        members: Sequence[int],
        spec: TransportSpec,
        meter: CommMeter,
        *,
        joins_hosts: bool = False,
    ) -> None:
        """`spec.num_shards` neighbouring members hold all shards among them; None: all members.

        joins_hosts  members are one of each host: they also sum whole tensors, and broadcast them
        """
        self._communicator, self._meter, self._leader = comm, meter, members[0]
        self.num_members = len(members)
        self.size = spec.num_shards or len(members)
        self._shard_groups = ShardGroups(self.size, len(members) // self.size)
        index = list(members).index(comm.rank)
        self.index, self.replica_index = index % self.size, index // self.size
        if joins_hosts:
            self._group = comm.get_group(members, spec.group_name("buckets"))
        if self.size > 1:
            replica = members[index - self.index : index - self.index + self.size]
            self._reduce_group, self._gather_group = (comm.get_group(replica, name) for name in ("buckets", "weights"))
        if self._shard_groups.num_replicas > 1:
            self._replica_group = comm.get_group(members[self.index :: self.size], "replicas")
        if spec.rest.weight == SPLIT:
            self._miss_report_group = comm.get_group(range(comm.size), "miss reports")
        self._two_stage_queue: deque[_TwoStageReduce] = deque()
        self._free_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def local_shard(self, flat: Tensor) -> Tensor:
        """This rank's shard, a view."""
        length = flat.numel() // self.size
        return flat[self.index * length : (self.index + 1) * length]

    # ---- over all members ----------------------------------------------------------------------------

    def all_reduce_async(self, flat: Tensor) -> Work:
        """Begin to sum `flat` over all members, in place; the result is `flat`."""
        self._meter.sent_bytes += ring_bytes(Change.ALL_REDUCE, flat, self.num_members)
        return self._group.all_reduce(flat)

    def broadcast(self, flat: Tensor) -> None:
        """Bring the first member's values to all. Waits."""
        self._group.broadcast(flat, self._leader)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks of the communicator, in rank order. Waits."""
        flat = torch.tensor(row, device=self._communicator.device)
        rows = all_gather_rows(self._miss_report_group, flat, size=self._communicator.size)
        return [each.tolist() for each in rows]

    # ---- shards --------------------------------------------------------------------------------------

    def reduce_scatter_async(self, flat: Tensor) -> Work:
        """Begin to sum `flat` over the members; the result is this rank's shard of the sum.

        The sum lies in this rank's shard of `flat`; the rest of `flat` then holds garbage.
        """
        self._meter.sent_bytes += self._shard_groups.reduce_sent_bytes(Change.REDUCE_SCATTER, flat.nbytes)
        result = self._reduce_scatter(flat) if self.size > 1 else Work(lambda: flat)
        if self._shard_groups.num_replicas == 1:
            return result
        two_stage = _TwoStageReduce(result, self._replica_group, self._two_stage_queue)
        self._two_stage_queue.append(two_stage)
        two_stage.is_completed()  # starts the second stage if the first needs no wait
        return Work(two_stage.wait, two_stage.is_completed, result.get_future)

    def _reduce_scatter(self, flat: Tensor) -> Work:
        shard = self.local_shard(flat)
        if flat.device.type == "cuda":
            return self._reduce_group.reduce_scatter(shard, flat)
        received = self._acquire_buffer(flat.numel(), flat.dtype)
        work = self._reduce_group.all_to_all(received, flat)

        def wait_and_sum() -> Tensor:
            work.wait()
            sum_in_order(received.view(self.size, -1).unbind(), out=shard)
            self._release_buffer(received)
            return shard

        return work._replace(wait=wait_and_sum)

    def all_gather_inplace_async(self, flat: Tensor) -> Work:
        """Begin to gather every rank's shard of `flat`, in place."""
        if flat.device.type == "cuda":
            return self.all_gather_async(self.local_shard(flat), flat)
        # A copy: gloo does not promise that the input may be a part of the output.
        shard = self._acquire_buffer(flat.numel() // self.size, flat.dtype).copy_(self.local_shard(flat))
        work = self.all_gather_async(shard, flat)

        def wait_and_release() -> None:
            work.wait()
            self._release_buffer(shard)

        return work._replace(wait=wait_and_release)

    def all_gather_async(self, shard: Tensor, out: Tensor) -> Work:
        """Begin to gather every rank's shard into `out`."""
        self._meter.sent_bytes += self._shard_groups.all_gather_sent_bytes(Change.ALL_GATHER, out.nbytes)
        return self._gather_group.all_gather(out, shard)

    def _acquire_buffer(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        free = self._free_buffers.setdefault((num_elements, dtype), [])
        return free.pop() if free else memory.allocate_private(num_elements, dtype, torch.device("cpu"))

    def _release_buffer(self, flat: Tensor) -> None:
        self._free_buffers[flat.numel(), flat.dtype].append(flat)


# ---- sums that rest split ------------------------------------------------------------------------------------------


class GradShards:
    """This rank's shard of each bucket's gradient, where several rounds add to it."""

    def __init__(self, grad_buffers: Sequence[Tensor], num_shards: int) -> None:
        self.flats = [
            memory.allocate_private(flat.numel() // num_shards, flat.dtype, flat.device) for flat in grad_buffers
        ]
        self.begin_step()

    def begin_step(self) -> None:
        """From now on, each bucket's first sum replaces the old values."""
        self._is_first_round = [True] * len(self.flats)

    def accumulate(self, bucket: int, total: Tensor) -> None:
        """Add the sum of one round."""
        if self._is_first_round[bucket]:
            self.flats[bucket].copy_(total)
        else:
            self.flats[bucket].add_(total)
        self._is_first_round[bucket] = False


class ShardedGroupReducer:
    """See `GradReducer`: reduce-scatters, where states rest split."""

    def __init__(
        self, grad_buffers: Sequence[Tensor], spec: TransportSpec, meter: CommMeter, sharded: ShardedCollectives
    ) -> None:
        self._meter, self._sharded = meter, sharded
        self.size, self.replica_index = sharded.num_members, sharded.replica_index
        self.grad_buffers, self.buffer_indices = grad_buffers, spec.buffer_indices
        self._is_prereduced = spec.is_prereduced
        self._grad_shards = GradShards(grad_buffers, sharded.size) if spec.rest.gradient == SPLIT else None
        self._pending: dict[int, Work] = {}

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        for other in self._pending_in_buffer(bucket):
            self._finish(other)

    def _pending_in_buffer(self, bucket: int) -> list[int]:
        return [other for other in self._pending if self.buffer_indices[other] == self.buffer_indices[bucket]]

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        blocking = self._pending_in_buffer(bucket)
        if len(self._pending) >= MAX_REDUCTIONS_IN_FLIGHT:
            blocking.append(next(iter(self._pending)))
        return all(self._pending[other].is_completed() for other in blocking)

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        flat = self.grad_buffers[bucket]
        if self._is_prereduced:
            self._pending[bucket] = _own(self._sharded.local_shard(flat))
            return
        if len(self._pending) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._finish(next(iter(self._pending)))
        work = self._pending[bucket] = self._sharded.reduce_scatter_async(flat)
        self._meter.record_async(Verb.REDUCE, reduction_index, work.get_future)

    def wait_reduce(self, bucket: int, factor: float) -> None:
        self._finish(bucket)

    def _finish(self, bucket: int) -> None:
        if bucket in self._pending:
            with self._meter.timed():
                total = self._pending.pop(bucket).wait()
            if self._grad_shards is not None:
                self._grad_shards.accumulate(bucket, total)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        return bucket not in self._pending or self._pending[bucket].is_completed()

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        scale_range(self.grad_shard(bucket), start, stop, factor)

    def reduce_shard(self, bucket: int) -> None:
        pass

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        return [self.grad_shard(bucket)]

    def grad_shard(self, bucket: int) -> BucketSlice:
        flat = self._sharded.local_shard(self.grad_buffers[bucket])
        start = self._sharded.index * flat.numel()
        if self._grad_shards is not None:
            flat = self._grad_shards.flats[bucket]
        return BucketSlice(start, start + flat.numel(), flat)

    def scale_grads(self, factor: float) -> None:
        raise AssertionError("these sums rest split: the update scales them")

    def all_gather_grads(self, bucket: int) -> None:
        raise AssertionError("these sums rest split")

    def end_step(self) -> None:
        if self._grad_shards is not None:
            self._grad_shards.begin_step()


# ---- weights -------------------------------------------------------------------------------------------------------


class WholeWeights:
    """See `WeightGatherer`: every one of `size` ranks has all weights to itself, and updates all of them."""

    shared_weights: Sequence[Tensor] | None = None
    is_writer, unshards_params = True, False

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def signal_backward_done(self) -> None:
        pass

    def wait_writable(self) -> None:
        pass

    def can_gather(self) -> bool:
        return True

    def all_gather_async(self, bucket: int, weight: Tensor) -> None:
        pass

    def wait(self, bucket: int) -> None:
        pass

    def broadcast(self) -> None:
        pass

    def end_step(self) -> None:
        pass


class GroupWeights(WholeWeights):
    """See `WeightGatherer`: all-gathers of the shards that ranks have updated.

    `WeightUnsharder` too: of the shards that rest split.
    """

    def __init__(self, sharded: ShardedCollectives, meter: CommMeter, *, unshards_params: bool) -> None:
        super().__init__(sharded.num_members)
        self._sharded, self._meter, self.unshards_params = sharded, meter, unshards_params
        self._pending: dict[int, Work] = {}  # in program order

    def can_gather(self) -> bool:
        return len(self._pending) < MAX_REDUCTIONS_IN_FLIGHT or next(iter(self._pending.values())).is_completed()

    def all_gather_async(self, bucket: int, weight: Tensor) -> None:
        if len(self._pending) >= MAX_REDUCTIONS_IN_FLIGHT:
            self.wait(next(iter(self._pending)))
        work = self._pending[bucket] = self._sharded.all_gather_inplace_async(weight)
        self._meter.record_async(Verb.GATHER, bucket, work.get_future)

    def wait(self, bucket: int) -> None:
        with self._meter.timed():
            while bucket in self._pending:
                self._pending.pop(next(iter(self._pending))).wait()

    def unshard_async(self, bucket: int, shard: Tensor, out: Tensor, unshard_index: int | None) -> Callable[[], None]:
        work = self._sharded.all_gather_async(shard, out)
        self._meter.record_async(Verb.UNSHARD, unshard_index, work.get_future)

        def wait() -> None:
            with self._meter.timed():
                work.wait()

        return wait

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        with self._meter.timed():
            return self._sharded.all_gather_ints(row)

    def end_step(self) -> None:
        for bucket in list(self._pending):
            self.wait(bucket)


# ---- the transport -------------------------------------------------------------------------------------------------


def make_group_transport(
    comm: Communicator, grad_buffers: Sequence[Tensor], spec: TransportSpec, meter: CommMeter, *, reason: str
) -> DataTransport:
    """The transport over process groups of all ranks of `comm`. `reason`: why not shared memory. Collective."""
    weights: WeightGatherer
    unsharder = None
    if spec.rest.state == WHOLE:
        weights = WholeWeights(comm.size)
        grads: GradReducer = WholeReducer(
            grad_buffers,
            spec.buffer_indices,
            meter,
            all_reduce=_own if spec.is_prereduced else _all_reduce(comm, spec, meter),
            index=comm.rank,
            size=comm.size,
        )
    else:
        sharded = ShardedCollectives(comm, range(comm.size), spec, meter)
        grads = ShardedGroupReducer(grad_buffers, spec, meter, sharded)
        weights = GroupWeights(sharded, meter, unshards_params=spec.rest.weight == SPLIT)
        unsharder = weights if weights.unshards_params else None
    sums = None
    if spec.num_scalars:
        sums = GroupSums(comm, range(comm.size), spec.group_name("scalars"), meter)
    name = f"{comm.backend} ({reason})" if comm.backend == "gloo" else comm.backend
    return DataTransport(grads, weights, ScalarReducer(spec.num_scalars, over_group=sums), name, unsharder)


def _all_reduce(comm: Communicator, spec: TransportSpec, meter: CommMeter) -> Callable[[Tensor], Work]:
    group = comm.get_group(range(comm.size), spec.group_name("buckets"))

    def begin(flat: Tensor) -> Work:
        meter.sent_bytes += ring_bytes(Change.ALL_REDUCE, flat, comm.size)
        return group.all_reduce(flat)

    return begin


def single_rank_transport(reducer: WholeReducer, num_scalars: int) -> DataTransport:
    """The transport of a rank that trains its own weights; where it is one of several, they have local steps."""
    scalars = ScalarReducer(num_scalars)
    return DataTransport(reducer, WholeWeights(reducer.size), scalars, "one rank, nothing to exchange")
