"""Process group: the transport over torch.distributed: gloo between processes and hosts, NCCL on GPUs.

pending  collectives that have begun and not been waited for, in program order
Law: every rank begins the same collectives of one group in the same order, with at most MAX_REDUCTIONS_IN_FLIGHT
pending.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.collectives import Work, all_gather_rows, ring_bytes
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.async_result import AsyncResult, always_done
from fourfold.parts.comm.reduce.fingerprint_check import FingerprintCheck
from fourfold.parts.comm.reduce.grad_shards import GradShards
from fourfold.parts.comm.reduce.protocol import BucketSlice, unit_scale
from fourfold.parts.comm.reduce.sharded_collectives import ShardedCollectives
from fourfold.parts.comm.reduce.transport_spec import TransportSpec
from fourfold.plan.memory import MAX_REDUCTIONS_IN_FLIGHT
from fourfold.words.layout import SPLIT, WHOLE, Change
from fourfold.words.program import LOSS
from fourfold.words.trace_events import NULL_RECORDER


class ProcessGroupTransport:
    """See `Transport`."""

    shared_weights: Sequence[Tensor] | None = None
    is_writer = True

    def __init__(
        self, grad_buffers: Sequence[Tensor], comm: Communicator, members: Sequence[int], spec: TransportSpec
    ) -> None:
        self._communicator, self._is_prereduced = comm, spec.is_prereduced
        rest = spec.rest
        self._group = comm.get_group(members, spec.group_name("buckets"))
        self._scalars_group = comm.get_group(members, spec.group_name("scalars"))
        self.name = "NCCL" if comm.device.type == "cuda" else "gloo"
        self.size, self.index = len(members), list(members).index(comm.rank)
        self.grad_buffers, self.buffer_indices = grad_buffers, spec.buffer_indices
        self.waiting_seconds, self.sent_bytes = 0.0, 0.0
        self.recorder, self.grad_scale_fn = NULL_RECORDER, unit_scale
        self._device = comm.device
        self._sharded = None if rest.state == WHOLE else ShardedCollectives(comm, members, num_shards=spec.num_shards)
        self.replica_index = 0 if self._sharded is None else self._sharded.replica_index
        self._grad_shards = None
        if self._sharded is not None and rest.gradient == SPLIT:
            self._grad_shards = GradShards(grad_buffers, self._sharded.size)
        self.unshards_params = rest.weight == SPLIT
        self._miss_report_group = comm.get_group(members, "pleas") if self.unshards_params else None
        self._shard_index_size = (
            (self.index, self.size) if self._sharded is None else (self._sharded.index, self._sharded.size)
        )
        self._pending_reduces: dict[int, AsyncResult] = {}
        self._pending_gathers: dict[int, Callable[[], None]] = {}  # in program order
        self._pending_scalars: dict[int, tuple[Tensor, Work]] = {}
        self._fingerprint_check = FingerprintCheck(self._scalars_group, members, self.index, comm.device)
        self._call, self._num_loss_values = "", 0

    def begin_call(self, call: str) -> None:
        self._call = call

    def check_same_call(self) -> None:
        self.all_reduce_scalars_async(LOSS, torch.zeros(0))
        self.wait_scalars(LOSS)

    def acquire_buffer(self, bucket: int) -> None:
        for other in [b for b in self._pending_reduces if self.buffer_indices[b] == self.buffer_indices[bucket]]:
            self.wait_reduce(other)

    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        if self._is_prereduced:
            self._pending_reduces[bucket] = AsyncResult(functools.partial(self._prereduced_shard, bucket), always_done)
            return
        if self._sharded is None:
            self.sent_bytes += ring_bytes(Change.ALL_REDUCE, self.grad_buffers[bucket], self.size)
            with self._communicator.report_dead_peers():
                work = self._group.all_reduce(self.grad_buffers[bucket])
            self.recorder.record_async_reduction(reduction_index, work.get_future)
            self._pending_reduces[bucket] = AsyncResult(_make_wait(work), work.is_completed)
            return
        self.sent_bytes += self._sharded.reduced_bytes(self.grad_buffers[bucket])
        if len(self._pending_reduces) >= MAX_REDUCTIONS_IN_FLIGHT:
            self.wait_reduce(next(iter(self._pending_reduces)))
        with self._communicator.report_dead_peers():
            on_start = functools.partial(self.recorder.record_async_reduction, reduction_index)
            self._pending_reduces[bucket] = self._sharded.reduce_scatter_async(self.grad_buffers[bucket], on_start)

    def _prereduced_shard(self, bucket: int) -> Tensor | None:
        """This rank's shard of a buffer that already holds the sum."""
        return None if self._sharded is None else self._sharded.local_shard(self.grad_buffers[bucket])

    def wait_reduce(self, bucket: int) -> None:
        if bucket in self._pending_reduces:
            with self._timed():
                total = self._pending_reduces.pop(bucket).wait()
            if self._grad_shards is not None and total is not None:
                self._grad_shards.accumulate(bucket, total)
            if self._sharded is None and (factor := self.grad_scale_fn()) != 1.0:
                self.grad_buffers[bucket].mul_(factor)

    def is_reduced(self, bucket: int) -> bool:
        return bucket not in self._pending_reduces or self._pending_reduces[bucket].is_done()

    def can_acquire_buffer(self, bucket: int) -> bool:
        blocking = [b for b in self._pending_reduces if self.buffer_indices[b] == self.buffer_indices[bucket]]
        if self._sharded is not None and len(self._pending_reduces) >= MAX_REDUCTIONS_IN_FLIGHT:
            blocking.append(next(iter(self._pending_reduces)))
        return all(self._pending_reduces[b].is_done() for b in blocking)

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if factor != 1.0:
            shard = self.grad_shard(bucket)
            shard.flat[start - shard.start : stop - shard.start].mul_(factor)

    def reduce_shard(self, bucket: int) -> None:
        pass

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        if self._sharded is not None:
            return [self.grad_shard(bucket)]
        flat = self.grad_buffers[bucket]
        return [BucketSlice(0, flat.numel(), flat)]

    def grad_shard(self, bucket: int) -> BucketSlice:
        length, (index, size) = self.grad_buffers[bucket].numel(), self._shard_index_size
        start, stop = length * index // size, length * (index + 1) // size
        flat = self.grad_buffers[bucket][start:stop] if self._grad_shards is None else self._grad_shards.flats[bucket]
        return BucketSlice(start, stop, flat)

    def scale_grads(self, factor: float) -> None:
        for flat in self.grad_buffers:
            flat.mul_(factor)

    def all_gather_grads(self, bucket: int) -> None:
        pass

    def signal_backward_done(self) -> None:
        pass

    def wait_weights_writable(self) -> None:
        pass

    def all_gather_weights_async(self, bucket: int, weight: Tensor) -> None:
        assert self._sharded is not None
        self.sent_bytes += self._sharded.gathered_bytes(weight)
        if len(self._pending_gathers) >= MAX_REDUCTIONS_IN_FLIGHT:
            self.wait_weights(next(iter(self._pending_gathers)))
        with self._communicator.report_dead_peers():
            self._pending_gathers[bucket] = self._sharded.all_gather_inplace_async(weight)

    def wait_weights(self, bucket: int) -> None:
        with self._timed():
            while bucket in self._pending_gathers:
                self._pending_gathers.pop(next(iter(self._pending_gathers)))()

    def unshard_async(self, bucket: int, shard: Tensor, out: Tensor) -> Callable[[], None]:
        assert self._sharded is not None
        self.sent_bytes += self._sharded.gathered_bytes(out)
        with self._communicator.report_dead_peers():
            wait = self._sharded.all_gather_async(shard, out)

        def timed_wait() -> None:
            with self._timed():
                wait()

        return timed_wait

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._miss_report_group is not None
        with self._timed():
            flat = torch.tensor(row, device=self._device)
            return [each.tolist() for each in all_gather_rows(self._miss_report_group, flat, size=self.size)]

    def end_step(self) -> None:
        for bucket in list(self._pending_gathers):
            self.wait_weights(bucket)
        if self._grad_shards is not None:
            self._grad_shards.begin_step()

    def broadcast_weights(self) -> None:
        pass

    def all_reduce_scalars_async(self, kind: int, values: Tensor) -> None:
        if kind == LOSS:
            self._num_loss_values = len(values)
            tensor = self._fingerprint_check.append_fingerprint(values, self._call)
        else:
            tensor = values.to(self._device, copy=True)
        with self._communicator.report_dead_peers():
            self._pending_scalars[kind] = tensor, self._scalars_group.all_reduce(tensor)

    def wait_scalars(self, kind: int) -> list[float]:
        tensor, work = self._pending_scalars.pop(kind)
        with self._timed():
            work.wait()
            sums = tensor.tolist()
        if kind != LOSS:
            return sums
        self._fingerprint_check.check(sums, self._call)
        return sums[: self._num_loss_values]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self.recorder.waiting(), self._communicator.report_dead_peers():
            yield
        self.waiting_seconds += time.perf_counter() - begin


def _make_wait(work: Work) -> Callable[[], None]:
    def wait() -> None:
        work.wait()

    return wait
