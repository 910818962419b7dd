"""Process group: the transport over torch.distributed: gloo between processes and hosts, NCCL on GPUs.

pending  collectives that have begun and not been waited for, in program order
round  one reduction of all buckets; a step that accumulates gradients has several
Law: every rank begins the same collectives of one group in the same order, with at most MAX_REDUCTIONS_IN_FLIGHT
pending.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.comm.collectives import all_gather_rows, ring_bytes
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.group_scalars import GroupScalars
from fourfold.comm.reduce.protocol import BucketSlice, DataTransport, GradReducer, TransportSpec, WeightGatherer
from fourfold.comm.reduce.sharded_collectives import AsyncResult, ShardedCollectives, always_done
from fourfold.comm.reduce.single_rank import LocalScalars, WholeFlats, WholeWeights
from fourfold.plan.memory import MAX_REDUCTIONS_IN_FLIGHT
from fourfold.torch_kit import memory
from fourfold.words.layout import SPLIT, WHOLE, Change
from fourfold.words.program import Verb

# ---- sums of several microbatches, split ---------------------------------------------------------------------------


class GradShards:
    """This rank's shard of each bucket's gradient."""

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


# ---- the transport -------------------------------------------------------------------------------------------------


def make_group_transport(
    comm: Communicator, grad_buffers: Sequence[Tensor], spec: TransportSpec, meter: CommMeter, *, reason: str
) -> DataTransport:
    """The transport over process groups of all ranks of `comm`. `reason`: why not shared memory. Collective."""
    grads: GradReducer
    weights: WeightGatherer
    if spec.rest.state == WHOLE:
        grads, weights = GroupReducer(comm, grad_buffers, spec, meter), WholeWeights(comm.size)
    else:
        sharded = ShardedCollectives(comm, range(comm.size), num_shards=spec.num_shards)
        grads = ShardedGroupReducer(comm, grad_buffers, spec, meter, sharded)
        weights = GroupWeights(comm, sharded, meter, unshards_params=spec.rest.weight == SPLIT)
    scalars = LocalScalars(0)
    if spec.num_scalars:
        scalars = GroupScalars(comm, spec.group_name("scalars"), spec.num_scalars, meter)
    name = backend_name(comm)
    return DataTransport(grads, weights, scalars, f"{name} ({reason})" if name == "gloo" else name)


def backend_name(comm: Communicator) -> str:
    """What carries the collectives of process groups."""
    return "NCCL" if comm.device.type == "cuda" else "gloo"


class GroupReducer(WholeFlats):
    """See `GradReducer`: all-reduces, where states rest whole."""

    def __init__(
        self, comm: Communicator, grad_buffers: Sequence[Tensor], spec: TransportSpec, meter: CommMeter
    ) -> None:
        super().__init__(grad_buffers, spec.buffer_indices)
        self._communicator, self._meter, self.size = comm, meter, comm.size
        self._group = comm.get_group(range(comm.size), spec.group_name("buckets"))
        self._is_prereduced = spec.is_prereduced
        self._pending: dict[int, AsyncResult] = {}

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        # A sum that was not waited for is still in its own buffer.
        if bucket in self._pending:
            assert factor is not None, "this buffer is free once its sum is made, which needs the factor"
            self.wait_reduce(bucket, factor)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return self.is_reduced(bucket, factor)

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        if self._is_prereduced:
            self._pending[bucket] = AsyncResult(_nothing, always_done)
            return
        self._meter.sent_bytes += ring_bytes(Change.ALL_REDUCE, self.grad_buffers[bucket], self.size)
        with self._communicator.report_dead_peers():
            work = self._group.all_reduce(self.grad_buffers[bucket])
        self._meter.record_async(Verb.REDUCE, reduction_index, work.get_future)
        self._pending[bucket] = AsyncResult(work.wait, work.is_completed)

    def wait_reduce(self, bucket: int, factor: float) -> None:
        if bucket in self._pending:
            with self._meter.timed(), self._communicator.report_dead_peers():
                self._pending.pop(bucket).wait()
            if factor != 1.0:
                self.grad_buffers[bucket].mul_(factor)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        return bucket not in self._pending or (factor is not None and self._pending[bucket].is_done())

    def grad_shard(self, bucket: int) -> BucketSlice:
        """An equal part for each rank."""
        flat, rank = self.grad_buffers[bucket], self._communicator.rank
        start, stop = flat.numel() * rank // self.size, flat.numel() * (rank + 1) // self.size
        return BucketSlice(start, stop, flat[start:stop])

    def end_step(self) -> None:
        pass


class ShardedGroupReducer:
    """See `GradReducer`: reduce-scatters, where states rest split."""

    def __init__(
        self,
        comm: Communicator,
        grad_buffers: Sequence[Tensor],
        spec: TransportSpec,
        meter: CommMeter,
        sharded: ShardedCollectives,
    ) -> None:
        self._communicator, self._meter, self._sharded = comm, meter, sharded
        self.size, self.replica_index = comm.size, sharded.replica_index
        self.grad_buffers, self.buffer_indices = grad_buffers, spec.buffer_indices
        self._is_prereduced = spec.is_prereduced
        self._grad_shards = GradShards(grad_buffers, sharded.size) if spec.rest.gradient == SPLIT else None
        self._pending: dict[int, AsyncResult] = {}

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        for other in self._pending_in_buffer(bucket):
            self._finish(other)

    def _pending_in_buffer(self, bucket: int) -> list[int]:
        return [other for other in self._pending if self.buffer_indices[other] == self.buffer_indices[bucket]]

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        blocking = self._pending_in_buffer(bucket)
        if len(self._pending) >= MAX_REDUCTIONS_IN_FLIGHT:
            blocking.append(next(iter(self._pending)))
        return all(self._pending[other].is_done() for other in blocking)

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        flat = self.grad_buffers[bucket]
        if self._is_prereduced:
            shard = functools.partial(self._sharded.local_shard, flat)
            self._pending[bucket] = AsyncResult(shard, always_done)
            return
        self._meter.sent_bytes += self._sharded.reduced_bytes(flat)
        if len(self._pending) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._finish(next(iter(self._pending)))
        with self._communicator.report_dead_peers():
            on_start = functools.partial(self._meter.record_async, Verb.REDUCE, reduction_index)
            self._pending[bucket] = self._sharded.reduce_scatter_async(flat, on_start)

    def wait_reduce(self, bucket: int, factor: float) -> None:
        self._finish(bucket)

    def _finish(self, bucket: int) -> None:
        if bucket in self._pending:
            with self._meter.timed(), self._communicator.report_dead_peers():
                total = self._pending.pop(bucket).wait()
            if self._grad_shards is not None:
                self._grad_shards.accumulate(bucket, total)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        return bucket not in self._pending or self._pending[bucket].is_done()

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if factor != 1.0:
            shard = self.grad_shard(bucket)
            shard.flat[start - shard.start : stop - shard.start].mul_(factor)

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


class GroupWeights(WholeWeights):
    """See `WeightGatherer`: all-gathers of the shards that ranks have updated, or of those that rest split."""

    def __init__(
        self, comm: Communicator, sharded: ShardedCollectives, meter: CommMeter, *, unshards_params: bool
    ) -> None:
        super().__init__(comm.size)
        self._communicator, self._sharded, self._meter = comm, sharded, meter
        self.unshards_params = unshards_params
        self._miss_report_group = comm.get_group(range(comm.size), "miss reports") if unshards_params else None
        self._pending: dict[int, AsyncResult] = {}  # in program order

    def can_gather(self) -> bool:
        return len(self._pending) < MAX_REDUCTIONS_IN_FLIGHT or next(iter(self._pending.values())).is_done()

    def all_gather_async(self, bucket: int, weight: Tensor) -> None:
        self._meter.sent_bytes += self._sharded.gathered_bytes(weight)
        if len(self._pending) >= MAX_REDUCTIONS_IN_FLIGHT:
            self.wait(next(iter(self._pending)))
        with self._communicator.report_dead_peers():
            on_start = functools.partial(self._meter.record_async, Verb.GATHER, bucket)
            self._pending[bucket] = self._sharded.all_gather_inplace_async(weight, on_start)

    def wait(self, bucket: int) -> None:
        with self._meter.timed(), self._communicator.report_dead_peers():
            while bucket in self._pending:
                self._pending.pop(next(iter(self._pending))).wait()

    def unshard_async(self, bucket: int, shard: Tensor, out: Tensor, unshard_index: int | None) -> Callable[[], None]:
        self._meter.sent_bytes += self._sharded.gathered_bytes(out)
        with self._communicator.report_dead_peers():
            on_start = functools.partial(self._meter.record_async, Verb.UNSHARD, unshard_index)
            wait = self._sharded.all_gather_async(shard, out, on_start)

        def timed_wait() -> None:
            with self._meter.timed(), self._communicator.report_dead_peers():
                wait()

        return timed_wait

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._miss_report_group is not None
        with self._meter.timed(), self._communicator.report_dead_peers():
            flat = torch.tensor(row, device=self._communicator.device)
            return [each.tolist() for each in all_gather_rows(self._miss_report_group, flat, size=self.size)]

    def end_step(self) -> None:
        for bucket in list(self._pending):
            self.wait(bucket)


def _nothing() -> None:
    """The result of a reduction that a codec has done already."""
