"""Shared memory: the processes of one host reduce without a message.

flag     only grows; where it lies, as slots and scalars do, is in `slotting.py`
slice    the part of every bucket that one rank sums, in rank order, into its own slot
Law: a slot is written while no other rank may read it. A rank reads others' slots after `launched` says that
they are complete, others' sums after `summed`, and nobody writes again before `closed` says that all have read.

Plain stores of the flags order after the data on x86 (total store order); elsewhere this transport is not used.
To sum, a rank reads its slice of all N slots and writes one slice, 1/N of the bucket; the update then reads every
slice where its owner put it.

Measured: `docs/measured.md`, "Collectives".
"""

import functools
import mmap
import os
import platform
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from fourfold.parts.comm.collectives import sum_in_order
from fourfold.parts.comm.reduce.async_result import AsyncResult
from fourfold.parts.comm.reduce.collective_fingerprint import CallBoard
from fourfold.parts.comm.reduce.grad_shards import GradShards
from fourfold.parts.comm.reduce.inter_host import InterHostReducer
from fourfold.parts.comm.reduce.protocol import BucketSlice, unit_scale
from fourfold.parts.comm.reduce.shared_memory.layout import (
    BACKWARD_DONE,
    CALL_BEGUN,
    COPIED,
    DEAD_PEER,
    FLAG_STRIDE,
    GRADS_READY,
    NUM_FLAGS,
    NUM_SCALAR_KINDS,
    REDUCED,
    SCALARS_READY,
    SCALED,
    STAGED,
    STEP_ENDED,
    WEIGHTS_READY,
    SharedMemoryLayout,
    view_grad_buffers,
    view_scalars,
    view_staging_buffers,
    view_weights,
)
from fourfold.parts.comm.reduce.shared_memory.unshard_staging import HostUnshardStaging, StagingFlags
from fourfold.plan.data import RESTING_LAYOUTS, RestingLayouts
from fourfold.plan.sample_order import shard_range
from fourfold.words.errors import PeerError
from fourfold.words.layout import PARTIAL, SPLIT
from fourfold.words.program import LOSS
from fourfold.words.trace_events import NULL_RECORDER

NUM_SPINS = 200
YIELD_SECONDS = 0.002
POLL_SECONDS = 0.0002
LIVENESS_CHECK_SECONDS = 0.05
DIVERGENCE_GRACE_SECONDS = 2.0


class SharedMemoryTransport:
    """The transport between the processes of a host; see `Transport`. `between` reaches the other hosts."""

    def __init__(
        self,
        mapping: mmap.mmap,
        layout: SharedMemoryLayout,
        *,
        index: int,
        size: int,
        rest: RestingLayouts = RESTING_LAYOUTS[0],
        ranks: Sequence[int] = (),
        peer_sockets: Mapping[int, socket.socket] | None = None,
        inter_host: InterHostReducer | None = None,
        is_prereduced: bool = False,
        time_limit_seconds: float = 1800.0,
    ) -> None:
        self.name = "shared memory" + (" + gloo between hosts" if inter_host else "")
        self.index, self.size = index, size
        self.waiting_seconds, self.recorder, self.grad_scale_fn = 0.0, NULL_RECORDER, unit_scale
        self._inter_host, self._time_limit_seconds = inter_host, time_limit_seconds
        # Else a codec has been between the hosts already: what this host's ranks have adds up to the whole sum.
        self._reduces_inter_host = inter_host is not None and not is_prereduced
        self._ranks = tuple(ranks) or tuple(range(size))
        self._peer_sockets = dict(peer_sockets or {})
        self._mapping = mapping
        self._flags = memoryview(mapping).cast("B").cast("q")
        self._region_words = layout.region_bytes // 8
        self._all_buffers = [view_grad_buffers(mapping, layout, region) for region in range(size)]
        self.grad_buffers: Sequence[torch.Tensor] = self._all_buffers[index]
        self.buffer_indices = layout.buffer_indices
        self._scalars = [view_scalars(mapping, layout, region) for region in range(size)]
        self._slices = [[_rank_slice(length, size, peer) for peer in range(size)] for length in layout.sizes]
        starts = [region * layout.region_bytes + layout.calls_offset for region in range(size)]
        self._call_board, self._call = CallBoard(mapping, starts, self._ranks), ""
        self._flag_counts = [0] * NUM_FLAGS
        self._num_scalars = [0] * NUM_SCALAR_KINDS
        self._pending_scalars: deque[int] = deque()  # measures that have begun
        self._reduced_scalars: dict[int, list[float]] = {}
        self._reduce_queue: list[tuple[int, int]] = []  # launched, not yet summed, in program order
        self._pending_inter_host: deque[tuple[int, AsyncResult]] = deque()  # summed here, on their way between hosts
        self._reduce_numbers = [0] * len(self.grad_buffers)  # the number of a bucket's last launch
        self._is_split = rest.state == SPLIT
        # Sums of one's own share can be made when they are used, a piece at a time that stays in the cache.
        self._is_lazy = self._is_split and rest.gradient == PARTIAL and not self._reduces_inter_host
        self._is_range_reduced = [False] * len(self.grad_buffers)
        hosts = inter_host.size if inter_host is not None else 1
        self._grad_shards = GradShards(self.grad_buffers, size * hosts) if rest.gradient == SPLIT else None
        self._pending_gathers: deque[Callable[[], None] | None] = (
            deque()
        )  # published, not yet on all of this host's memory
        self._gather_numbers = [0] * len(self.grad_buffers)  # the number of a bucket's last publication
        self.is_writer = index == 0 or not layout.weights_bytes
        self.shared_weights: Sequence[torch.Tensor] | None = None
        behind = size * layout.region_bytes
        if layout.weights_bytes:
            self.shared_weights = view_weights(mapping, layout, behind)
        self.replica_index = 0 if inter_host is None else inter_host.replica_index
        self._staging = (
            self._make_staging(view_staging_buffers(mapping, layout, behind)) if layout.staging_bytes else None
        )
        self.unshards_params = self._staging is not None

    @property
    def sent_bytes(self) -> float:
        return 0.0 if self._inter_host is None else self._inter_host.sent_bytes

    # ---- flags --------------------------------------------------------------------------------------

    def _increment_flag(self, flag: int) -> None:
        self._flag_counts[flag] += 1
        self._flags[self.index * self._region_words + flag * FLAG_STRIDE] = self._flag_counts[flag]

    def _min_flag(self, flag: int) -> int:
        return min(self._flags[peer * self._region_words + flag * FLAG_STRIDE] for peer in range(self.size))

    def _wait_flag(self, flag: int, count: int) -> None:
        """Until every rank's flag has reached `count`: spin, then yield, then doze, looking for dead peers."""
        for _ in range(NUM_SPINS):
            if self._min_flag(flag) >= count:
                return
        begin = time.perf_counter()
        looked = begin
        with self.recorder.waiting():
            while self._min_flag(flag) < count:
                now = time.perf_counter()
                if now - begin < YIELD_SECONDS:
                    os.sched_yield()
                    continue
                time.sleep(POLL_SECONDS)
                if now - looked > LIVENESS_CHECK_SECONDS:
                    looked = now
                    self._check_divergence(now - begin)
                    try:
                        self._check_dead_peers(flag, count, now - begin)
                    except PeerError:
                        self._compare_calls()  # A rank that went astray ends of it: that is the cause, not its death.
                        raise
        self.waiting_seconds += time.perf_counter() - begin

    def _check_dead_peers(self, flag: int, count: int, waited_seconds: float) -> None:
        # Nothing is ever sent on a link: it can be read only once its other end is gone.
        poll = select.poll()
        for link in self._peer_sockets.values():
            poll.register(link, select.POLLIN)
        ready = {handle for handle, _ in poll.poll(0)}
        dead = [peer for peer, link in self._peer_sockets.items() if link.fileno() in ready]
        # The leader alone has links to all: it writes down who died before it ends of it.
        known = self._flags[DEAD_PEER * FLAG_STRIDE]
        if known == 0 and dead and self.index == 0:
            self._flags[DEAD_PEER * FLAG_STRIDE] = known = dead[0] + 1
        if (known or dead) and self._min_flag(flag) < count:
            rank = self._ranks[known - 1 if known else dead[0]]
            raise PeerError(
                f"rank {rank} (host {platform.node()}) died while rank {self._ranks[self.index]} waited for it"
            )
        if waited_seconds > self._time_limit_seconds:
            flags = {self._ranks[p]: self._flags[p * self._region_words + flag * FLAG_STRIDE] for p in range(self.size)}
            late = ", ".join(str(rank) for rank, reached in flags.items() if reached < count)
            raise PeerError(f"rank {late} did not come within {self._time_limit_seconds:.0f} s")

    # ---- calls ---------------------------------------------------------------------------------------

    def begin_call(self, call: str) -> None:
        self._call = call
        self._call_board.write(self.index, self._flag_counts[CALL_BEGUN] + 1, call)
        self._increment_flag(CALL_BEGUN)

    def check_same_call(self) -> None:
        self._wait_flag(CALL_BEGUN, self._flag_counts[CALL_BEGUN])
        self._compare_calls()
        if self._inter_host is not None:
            self._inter_host.all_reduce_scalars([], self._call)

    def _check_divergence(self, waited_seconds: float) -> None:
        # Those that are only late are waited for, so that every rank's call can be told.
        if self._min_flag(CALL_BEGUN) >= self._flag_counts[CALL_BEGUN] or waited_seconds > DIVERGENCE_GRACE_SECONDS:
            self._compare_calls()

    def _compare_calls(self) -> None:
        def call_counts() -> list[int]:
            return [self._flags[peer * self._region_words + CALL_BEGUN * FLAG_STRIDE] for peer in range(self.size)]

        self._call_board.check(self.index, call_counts)

    # ---- weights that rest split between hosts -------------------------------------------------------

    def _make_staging(self, stages: Sequence[torch.Tensor]) -> HostUnshardStaging:
        flags = StagingFlags(
            signal_staged=functools.partial(self._increment_flag, STAGED),
            signal_copied=functools.partial(self._increment_flag, COPIED),
            wait_all_staged=functools.partial(self._wait_flag, STAGED),
            wait_all_copied=functools.partial(self._wait_flag, COPIED),
        )
        return HostUnshardStaging(stages, flags)

    def unshard_async(self, bucket: int, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        assert self._staging is not None
        assert self._inter_host is not None
        begin = functools.partial(self._inter_host.all_gather_async, shard)
        return self._timed(self._staging.unshard_async(slice(*self._slices[bucket][self.index]), out, begin))

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._inter_host is not None
        begin = time.perf_counter()
        with self.recorder.waiting():
            everyone = self._inter_host.all_gather_ints(row)
        self.waiting_seconds += time.perf_counter() - begin
        return everyone

    def _timed(self, wait: Callable[[], None]) -> Callable[[], None]:
        def timed_wait() -> None:
            begin, waited = time.perf_counter(), self.waiting_seconds
            with self.recorder.waiting():
                wait()
            self.waiting_seconds = waited + time.perf_counter() - begin

        return timed_wait

    # ---- a bucket's reduction -----------------------------------------------------------------------

    def acquire_buffer(self, bucket: int) -> None:
        self._wait_flag(STEP_ENDED, self._flag_counts[STEP_ENDED])
        if self._grad_shards is not None:
            numbers = [
                n
                for n, turn in zip(self._reduce_numbers, self.buffer_indices, strict=True)
                if turn == self.buffer_indices[bucket]
            ]
            self._reduce_through(max(numbers))
            self._wait_flag(REDUCED, max(numbers))

    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        self._reduce_queue.append((bucket, reduction_index))
        self._increment_flag(GRADS_READY)
        self._reduce_numbers[bucket] = self._flag_counts[GRADS_READY]
        if not self._is_lazy:
            self._reduce_ready()

    def wait_reduce(self, bucket: int) -> None:
        number = self._reduce_numbers[bucket]
        if self._is_lazy:
            self._wait_flag(GRADS_READY, number)
            return
        done = self._flag_counts[REDUCED] if self._is_split else self._min_flag(REDUCED)
        if done >= number:
            return
        begin, waited = time.perf_counter(), self.waiting_seconds
        with self.recorder.waiting():
            self._reduce_through(number)
            if not self._is_split:
                self._wait_flag(REDUCED, number)
        self.waiting_seconds = waited + time.perf_counter() - begin

    def is_reduced(self, bucket: int) -> bool:
        number = self._reduce_numbers[bucket]
        if self._is_lazy:
            return self._min_flag(GRADS_READY) >= number
        self._reduce_ready()
        while self._pending_inter_host and self._pending_inter_host[0][1].is_done():
            self._reduce_through(self._flag_counts[REDUCED] + 1)
        return (self._flag_counts[REDUCED] if self._is_split else self._min_flag(REDUCED)) >= number

    def can_acquire_buffer(self, bucket: int) -> bool:
        last = max(
            n
            for n, turn in zip(self._reduce_numbers, self.buffer_indices, strict=True)
            if turn == self.buffer_indices[bucket]
        )
        self._reduce_ready()
        while self._pending_inter_host and self._pending_inter_host[0][1].is_done():
            self._reduce_through(self._flag_counts[REDUCED] + 1)
        return self._min_flag(STEP_ENDED) >= self._flag_counts[STEP_ENDED] and self._min_flag(REDUCED) >= last

    def _reduce_through(self, number: int) -> None:
        """Have this rank's part of the first `number` reductions done."""
        while self._flag_counts[REDUCED] < number:
            self._reduce_ready()
            if self._pending_inter_host:
                # Before any wait for a later launch: who is to launch it may be waiting for this sum.
                bucket, flight = self._pending_inter_host.popleft()
                self._finish_reduce(bucket, flight.wait())
            elif self._flag_counts[REDUCED] < number:
                self._wait_flag(GRADS_READY, self._flag_counts[GRADS_READY] - len(self._reduce_queue) + 1)

    def _reduce_ready(self) -> None:
        """Sum this rank's slice of every bucket that all ranks have launched."""
        begin = time.perf_counter()
        there = max(0, self._min_flag(GRADS_READY) - (self._flag_counts[GRADS_READY] - len(self._reduce_queue)))
        for bucket, name in self._reduce_queue[:there]:
            with self.recorder.reducing(name):
                start, stop = self._slices[bucket][self.index]
                mine = self._sum_range(bucket, start, stop)
                if not self._is_split and (factor := self.grad_scale_fn()) != 1.0:
                    mine.mul_(factor)
            if self._inter_host is None or not self._reduces_inter_host:
                self._finish_reduce(bucket, self._host_shard(mine))
            else:
                begun = (
                    self._inter_host.reduce_scatter_async(mine)
                    if self._is_split
                    else self._inter_host.all_reduce_async(mine)
                )
                self._pending_inter_host.append((bucket, begun))
        del self._reduce_queue[:there]
        self.waiting_seconds += time.perf_counter() - begin

    def _host_shard(self, mine: torch.Tensor) -> torch.Tensor:
        """This host's part of a rank's slice."""
        if self._inter_host is None:
            return mine
        return mine[slice(*shard_range(0, mine.numel(), self._inter_host.size, self._inter_host.index))]

    def _finish_reduce(self, bucket: int, total: torch.Tensor) -> None:
        if self._grad_shards is not None:
            self._grad_shards.accumulate(bucket, total)
        self._increment_flag(REDUCED)

    def _sum_range(self, bucket: int, start: int, stop: int) -> torch.Tensor:
        """The sum of [start, stop) over this host's ranks, in this rank's slot."""
        parts = [slots[bucket][start:stop] for slots in self._all_buffers]
        sum_in_order(parts, out=parts[self.index])
        return parts[self.index]

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if self._is_lazy and not self._is_range_reduced[bucket]:
            self._sum_range(bucket, start, stop)
        if factor != 1.0:
            own = self.grad_shard(bucket)
            own.flat[start - own.start : stop - own.start].mul_(factor)

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

    def reduce_shard(self, bucket: int) -> None:
        if self._is_lazy and not self._is_range_reduced[bucket]:
            self._sum_range(bucket, *self._slices[bucket][self.index])
            self._is_range_reduced[bucket] = True

    def scale_grads(self, factor: float) -> None:
        for slot, slices in zip(self.grad_buffers, self._slices, strict=True):
            start, stop = slices[self.index]
            slot[start:stop].mul_(factor)
        self._increment_flag(SCALED)
        self._wait_flag(SCALED, self._flag_counts[SCALED])

    def all_gather_grads(self, bucket: int) -> None:
        for peer, (start, stop) in enumerate(self._slices[bucket]):
            if peer != self.index:
                self.grad_buffers[bucket][start:stop].copy_(self._all_buffers[peer][bucket][start:stop])

    def signal_backward_done(self) -> None:
        self._increment_flag(BACKWARD_DONE)

    def wait_weights_writable(self) -> None:
        if self.shared_weights is not None:
            self._wait_flag(BACKWARD_DONE, self._flag_counts[BACKWARD_DONE])

    def all_gather_weights_async(self, bucket: int, weight: torch.Tensor) -> None:
        land = None
        if self._inter_host is not None and self._inter_host.size > 1:
            start, stop = self._slices[bucket][self.index]
            land = self._inter_host.all_gather_inplace_async(weight[start:stop])
        self._pending_gathers.append(land)
        self._gather_numbers[bucket] = self._flag_counts[WEIGHTS_READY] + len(self._pending_gathers)
        if land is None:
            self._gather_through(self._gather_numbers[bucket])

    def _gather_through(self, number: int) -> None:
        """Have this rank's slices of the first `number` publications in this host's memory, told one by one."""
        while self._flag_counts[WEIGHTS_READY] < number:
            if (land := self._pending_gathers.popleft()) is not None:
                land()
            self._increment_flag(WEIGHTS_READY)

    def wait_weights(self, bucket: int) -> None:
        # Those before it too, in program order: a rank of another host may wait for one of them.
        self._gather_through(self._gather_numbers[bucket])
        self._wait_flag(WEIGHTS_READY, self._gather_numbers[bucket])

    def end_step(self) -> None:
        self._gather_through(self._flag_counts[WEIGHTS_READY] + len(self._pending_gathers))
        self._reduce_queue.clear()
        self._is_range_reduced = [False] * len(self._is_range_reduced)
        if self._grad_shards is not None:
            self._grad_shards.begin_step()
        self._increment_flag(STEP_ENDED)
        # Every rank has updated its share: the weights are whole.
        self._wait_flag(WEIGHTS_READY, self._flag_counts[WEIGHTS_READY])

    def broadcast_weights(self) -> None:
        assert self.shared_weights is not None
        if self._inter_host is not None and self.is_writer:
            for flat in self.shared_weights:
                self._inter_host.broadcast(flat)

    # ---- scalars and weights ------------------------------------------------------------------------

    def all_reduce_scalars_async(self, kind: int, values: torch.Tensor) -> None:
        turn = self._flag_counts[SCALARS_READY + kind] % 2
        self._scalars[self.index][kind, turn, : len(values)] = values
        self._num_scalars[kind] = len(values)
        self._pending_scalars.append(kind)
        self._increment_flag(SCALARS_READY + kind)

    def wait_scalars(self, kind: int) -> list[float]:
        # In the order in which they were begun, whichever is asked for first: between hosts they pair up by order, and
        # one rank may need the loss while it reduces, another only after other measures.
        while kind in self._pending_scalars:
            first = self._pending_scalars.popleft()
            self._reduced_scalars[first] = self._sum_scalars(first)
        return self._reduced_scalars.pop(kind)

    def _sum_scalars(self, kind: int) -> list[float]:
        count = self._flag_counts[SCALARS_READY + kind]
        self._wait_flag(SCALARS_READY + kind, count)
        if kind == LOSS:
            self._compare_calls()
        total = self._scalars[0][kind, (count - 1) % 2, : self._num_scalars[kind]].clone()
        for peer in range(1, self.size):
            total += self._scalars[peer][kind, (count - 1) % 2, : self._num_scalars[kind]]
        if self._inter_host is None:
            return total.tolist()
        return self._inter_host.all_reduce_scalars(total.tolist(), self._call if kind == LOSS else None)


def _rank_slice(length: int, size: int, index: int) -> tuple[int, int]:
    """[start, stop) of a rank's slice; cut at multiples of 32 elements: no cache line has two writers."""
    blocks = -(-length // 32)
    return min(length, blocks * index // size * 32), min(length, blocks * (index + 1) // size * 32)
