"""Group: transports over a process group: gloo between processes and hosts, NCCL on GPUs.

flying    reductions that have begun and not ended, in program order
Law: every rank begins the same collectives of one group in the same order, and no more of them wait than `IN_FLIGHT`.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.collectives import Group, Work, all_gather_rows
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce import collective_fingerprint
from fourfold.parts.comm.reduce.protocol import BucketSlice, unit_scale
from fourfold.parts.comm.reduce.sharded_collectives import AsyncResult, ShardedCollectives, always_done
from fourfold.plan.data import RestingLayouts
from fourfold.plan.memory import MAX_REDUCTIONS_IN_FLIGHT
from fourfold.words.layout import SPLIT, WHOLE, Change
from fourfold.words.layout import collective_sent_bytes as layout_bytes
from fourfold.words.program import LOSS
from fourfold.words.trace_events import NULL_RECORDER

NUM_LOSS_SCALARS = 8


class ReductionSpec(NamedTuple):
    """What a transport is for: where buckets rest, which of them take turns in a slot, and whose groups it uses.

    `coded`: what is launched is the sum over all ranks that a process group connects; a codec has seen to it.
    """

    rest: RestingLayouts
    buffer_indices: tuple[int, ...]
    purpose: str = ""
    is_prereduced: bool = False
    num_shards: int | None = None
    """Among how many neighbouring ranks that which rests split is split; None: all."""

    def group_name(self, what: str) -> str:
        return f"{self.purpose} {what}".strip()


class _FingerprintCheck:
    """A group's tags: each member adds its own in a place of its own, so that the sum holds all of them.

    All calls sum LOSS scalars of one length first: whichever two calls meet, they meet there.
    """

    def __init__(self, group: Group, members: Sequence[int], index: int, device: torch.device):
        self._group, self._members, self._index, self._device = group, members, index, device

    def append_fingerprint(self, values: Tensor, call: str) -> Tensor:
        """float64 [NUM_LOSS_SCALARS + members]; at most NUM_LOSS_SCALARS values, or they would overwrite the tags."""
        assert len(values) <= NUM_LOSS_SCALARS
        tensor = torch.zeros(NUM_LOSS_SCALARS + len(self._members), dtype=torch.float64, device=self._device)
        tensor[: len(values)] = values
        tensor[NUM_LOSS_SCALARS + self._index] = collective_fingerprint.fingerprint(call)
        return tensor

    def check(self, sums: Sequence[float], call: str) -> None:
        """Raise DivergenceError, on all members alike, unless all tags are the same."""
        if len(set(sums[NUM_LOSS_SCALARS:])) == 1:
            return
        mine = torch.frombuffer(bytearray(collective_fingerprint.encode_call(call)), dtype=torch.uint8).to(self._device)
        texts = [
            collective_fingerprint.decode_call(bytes(row.tolist()))
            for row in all_gather_rows(self._group, mine, size=len(self._members))
        ]
        raise collective_fingerprint.divergence_error(dict(zip(self._members, texts, strict=True)))


class ProcessGroupTransport:
    """The transport over a process group; see `Transport`."""

    shared_weights: Sequence[Tensor] | None = None
    is_writer = True

    def __init__(
        self, grad_buffers: Sequence[Tensor], ranks: Communicator, members: Sequence[int], spec: ReductionSpec
    ) -> None:
        self._communicator, self._is_prereduced = ranks, spec.is_prereduced
        rest, turns = spec.rest, spec.buffer_indices
        self._group = ranks.get_group(members, spec.group_name("buckets"))
        self._scalars_group = ranks.get_group(members, spec.group_name("scalars"))
        self.name = "NCCL" if ranks.device.type == "cuda" else "gloo"
        self.size, self.index = len(members), list(members).index(ranks.rank)
        self.grad_buffers, self.buffer_indices = grad_buffers, turns
        self.waiting_seconds, self.sent_bytes = 0.0, 0.0
        self.recorder, self.grad_scale_fn = NULL_RECORDER, unit_scale
        self._device = ranks.device
        self._sharded = None if rest.state == WHOLE else ShardedCollectives(ranks, members, num_shards=spec.num_shards)
        self.replica_index = 0 if self._sharded is None else self._sharded.replica_index
        self._grad_shards = None
        if self._sharded is not None and rest.gradient == SPLIT:
            self._grad_shards = GradShards(grad_buffers, self._sharded.size)
        self.unshards_params = rest.weight == SPLIT
        self._miss_report_group = ranks.get_group(members, "pleas") if self.unshards_params else None
        self._shard_index_size = (
            (self.index, self.size) if self._sharded is None else (self._sharded.index, self._sharded.size)
        )
        self._pending_reduces: dict[int, AsyncResult] = {}
        self._pending_gathers: dict[int, Callable[[], None]] = {}  # on their way to all, in program order
        self._pending_scalars: dict[int, tuple[Tensor, Work]] = {}
        self._fingerprint_check = _FingerprintCheck(self._scalars_group, members, self.index, ranks.device)
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
            follow = functools.partial(self.recorder.record_async_reduction, reduction_index)
            self._pending_reduces[bucket] = self._sharded.reduce_scatter_async(self.grad_buffers[bucket], follow)

    def _prereduced_shard(self, bucket: int) -> Tensor | None:
        """This rank's share of a slot that holds the sum already."""
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
        waited_for = [b for b in self._pending_reduces if self.buffer_indices[b] == self.buffer_indices[bucket]]
        if self._sharded is not None and len(self._pending_reduces) >= MAX_REDUCTIONS_IN_FLIGHT:
            waited_for.append(next(iter(self._pending_reduces)))
        return all(self._pending_reduces[b].is_done() for b in waited_for)

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if factor != 1.0:
            own = self.grad_shard(bucket)
            own.flat[start - own.start : stop - own.start].mul_(factor)

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
            land = self._sharded.all_gather_async(shard, out)

        def timed_wait() -> None:
            with self._timed():
                land()

        return timed_wait

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._miss_report_group is not None
        with self._timed():
            mine = torch.tensor(row, device=self._device)
            return [each.tolist() for each in all_gather_rows(self._miss_report_group, mine, size=self.size)]

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


class GradShards:
    """This rank's shares of the gradients, where they rest split: what each round adds up to."""

    def __init__(self, grad_buffers: Sequence[Tensor], num_shards: int) -> None:
        self.flats = [
            memory.allocate_private(flat.numel() // num_shards, flat.dtype, flat.device) for flat in grad_buffers
        ]
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: the first sum of every bucket replaces what is there."""
        self._is_first_round = [True] * len(self.flats)

    def accumulate(self, bucket: int, total: Tensor) -> None:
        """Take in the sum of a round."""
        if self._is_first_round[bucket]:
            self.flats[bucket].copy_(total)
        else:
            self.flats[bucket].add_(total)
        self._is_first_round[bucket] = False


class GroupInterHostReducer:
    """The ranks of one local index on every host, over gloo; see `shared.Between`. `use.shard` counts hosts."""

    def __init__(self, ranks: Communicator, members: Sequence[int], spec: ReductionSpec) -> None:
        self._communicator = ranks
        self._group = ranks.get_group(members, spec.group_name("buckets"))
        self._scalars_group = ranks.get_group(members, spec.group_name("scalars"))
        self._leader, self.sent_bytes = members[0], 0.0
        index = list(members).index(ranks.rank) if ranks.rank in members else -1
        self._sharded = ShardedCollectives(ranks, members, num_shards=spec.num_shards)
        self.size, self.index, self.replica_index = self._sharded.size, self._sharded.index, self._sharded.replica_index
        self._miss_report_group = ranks.get_group(range(ranks.size), "pleas") if spec.rest.weight == SPLIT else None
        self._fingerprint_check = _FingerprintCheck(self._scalars_group, members, index, torch.device("cpu"))

    def all_reduce_async(self, flat: Tensor) -> AsyncResult:
        self.sent_bytes += ring_bytes(Change.ALL_REDUCE, flat, self._sharded.shard_groups.size)
        with self._communicator.report_dead_peers():
            work = self._group.all_reduce(flat)

        def wait() -> Tensor:
            with self._communicator.report_dead_peers():
                work.wait()
            return flat

        return AsyncResult(wait, work.is_completed)

    def reduce_scatter_async(self, flat: Tensor) -> AsyncResult:
        self.sent_bytes += self._sharded.reduced_bytes(flat)
        with self._communicator.report_dead_peers():
            return self._sharded.reduce_scatter_async(flat)

    def all_gather_inplace_async(self, flat: Tensor) -> Callable[[], None]:
        self.sent_bytes += self._sharded.gathered_bytes(flat)
        with self._communicator.report_dead_peers():
            return self._sharded.all_gather_inplace_async(flat)

    def all_gather_async(self, shard: Tensor, out: Tensor) -> Callable[[], None]:
        self.sent_bytes += self._sharded.gathered_bytes(out)
        with self._communicator.report_dead_peers():
            return self._sharded.all_gather_async(shard, out)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._miss_report_group is not None
        with self._communicator.report_dead_peers():
            return [
                each.tolist()
                for each in all_gather_rows(self._miss_report_group, torch.tensor(row), size=self._communicator.size)
            ]

    def broadcast(self, flat: Tensor) -> None:
        with self._communicator.report_dead_peers():
            self._group.broadcast(flat, self._leader)

    def all_reduce_scalars(self, values: Sequence[float], call: str | None = None) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if call is not None:
            tensor = self._fingerprint_check.append_fingerprint(tensor, call)
        with self._communicator.report_dead_peers():
            self._scalars_group.all_reduce(tensor).wait()
        sums = tensor.tolist()
        if call is not None:
            self._fingerprint_check.check(sums, call)
        return sums[: len(values)]


class GroupMessageGatherer:
    """Ranks that gather each other's messages; see `coded.Wire`."""

    def __init__(self, ranks: Communicator, members: Sequence[int]) -> None:
        self._communicator, self._group = ranks, ranks.get_group(members, "messages")
        self.size, self.sent_bytes = len(members), 0.0

    def all_gather_async(self, payload: Tensor) -> AsyncResult:
        """Begin to bring the messages [bytes] of all to all; what lands are they, in the order of the members."""
        everyone = torch.empty(self.size * payload.numel(), dtype=payload.dtype, device=payload.device)
        self.sent_bytes += ring_bytes(Change.ALL_GATHER, everyone, self.size)
        with self._communicator.report_dead_peers():
            work = self._group.all_gather(everyone, payload)

        def wait() -> Sequence[Tensor]:
            with self._communicator.report_dead_peers():
                work.wait()
            return everyone.view(self.size, -1).unbind()

        return AsyncResult(wait, work.is_completed)


def ring_bytes(collective: Change, flat: Tensor, size: int) -> float:
    """Bytes each of `size` ranks sends to change the layout of `flat`."""
    return layout_bytes(collective, whole_bytes=flat.numel() * flat.element_size(), size=size)


def _make_wait(work: Work) -> Callable[[], None]:
    def wait() -> None:
        work.wait()

    return wait
