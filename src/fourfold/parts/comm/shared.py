"""Shared memory: the processes of one host reduce without a message.

region   one rank's part of the mapping: its flags, its scalars, its slots
flag     an int64 that only its owner writes and that only grows
slice    the part of every bucket that one rank sums, in rank order, into its own slot
Law: a slot is written while no other rank may read it. A rank reads others' slots after `launched` says that
they are complete, others' sums after `summed`, and nobody writes again before `closed` says that all have read.

Plain stores of the flags order after the data on x86 (total store order); elsewhere this transport is not used.
To sum, a rank reads its slice of all N slots and writes one slice, 1/N of the bucket; the update then reads every
slice where its owner put it.

Measured: `docs/measured.md`, "Collectives".
"""

import mmap
import os
import platform
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from fourfold.parts.comm.transport import Part
from fourfold.plan.order import share
from fourfold.words.errors import PeerError
from fourfold.words.spans import SILENT

FLAG_STRIDE = 8  # int64s: a cache line of its own for each flag
LAUNCHED, SUMMED, SCALED, CLOSED, DEAD, MEASURED = range(6)
NUM_MEASURES = 4
NUM_FLAGS = MEASURED + NUM_MEASURES
ALIGNMENT_BYTES = 4096
SPINS = 200
YIELD_SECONDS = 0.002
POLL_SECONDS = 0.0002
LIVENESS_SECONDS = 0.05


class Between(Protocol):
    """The ranks of the same local index on all hosts, and which of them this one is."""

    size: int
    index: int

    def begin(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin an all-reduce in place; the returned function waits for it."""
        ...

    def measure(self, values: Sequence[float]) -> list[float]: ...


class Slotting:
    """Where things lie in a region: flags, then scalars, then slots. Pure arithmetic, the same on every rank."""

    def __init__(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], *, num_scalars: int) -> None:
        self.sizes, self.dtypes, self.num_scalars = tuple(sizes), tuple(dtypes), num_scalars
        flags = _aligned(8 * FLAG_STRIDE * NUM_FLAGS)
        # Two copies of the scalars, by turns: a rank is never two measures ahead of another.
        scalars = _aligned(8 * num_scalars * NUM_MEASURES * 2)
        self.scalars_offset, offset = flags, flags + scalars
        self.offsets = []
        for size, dtype in zip(self.sizes, self.dtypes, strict=True):
            self.offsets.append(offset)
            offset += _aligned(size * dtype.itemsize)
        self.region_bytes = offset


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Shared:
    """The transport between the processes of a host; see `Transport`. `between` reaches the other hosts."""

    def __init__(
        self,
        mapping: mmap.mmap,
        slotting: Slotting,
        *,
        index: int,
        size: int,
        ranks: Sequence[int] = (),
        links: Mapping[int, socket.socket] | None = None,
        between: Between | None = None,
        time_limit_seconds: float = 1800.0,
    ) -> None:
        self.name = "shared memory" + (" + gloo between hosts" if between else "")
        self.index, self.size, self.waiting_seconds, self.recorder = index, size, 0.0, SILENT
        self._between, self._limit = between, time_limit_seconds
        self._ranks = tuple(ranks) or tuple(range(size))
        self._links = dict(links or {})
        self._mapping = mapping
        self._flags = memoryview(mapping).cast("B").cast("q")
        self._words = slotting.region_bytes // 8
        self._all_slots = [_slots(mapping, slotting, region) for region in range(size)]
        self.slots: Sequence[torch.Tensor] = self._all_slots[index]
        self._scalars = [_scalars(mapping, slotting, region) for region in range(size)]
        self._slices = [[_slice(length, size, peer) for peer in range(size)] for length in slotting.sizes]
        self._counts = [0] * NUM_FLAGS
        self._lengths = [0] * NUM_MEASURES
        self._queue: list[int] = []  # launched, not yet summed, in program order
        self._flying: deque[Callable[[], None]] = deque()  # summed here, on their way between hosts
        self._numbers = [0] * len(self.slots)  # the number of a bucket's last launch

    # ---- flags --------------------------------------------------------------------------------------

    def _raise_flag(self, flag: int) -> None:
        self._counts[flag] += 1
        self._flags[self.index * self._words + flag * FLAG_STRIDE] = self._counts[flag]

    def _least(self, flag: int) -> int:
        return min(self._flags[peer * self._words + flag * FLAG_STRIDE] for peer in range(self.size))

    def _wait(self, flag: int, count: int) -> None:
        """Until every rank's flag has reached `count`: spin, then yield, then doze, looking for dead peers."""
        for _ in range(SPINS):
            if self._least(flag) >= count:
                return
        begin = time.perf_counter()
        looked = begin
        with self.recorder.waiting():
            while self._least(flag) < count:
                now = time.perf_counter()
                if now - begin < YIELD_SECONDS:
                    os.sched_yield()
                    continue
                time.sleep(POLL_SECONDS)
                if now - looked > LIVENESS_SECONDS:
                    looked = now
                    self._look_for_dead(flag, count, now - begin)
        self.waiting_seconds += time.perf_counter() - begin

    def _look_for_dead(self, flag: int, count: int, waited_seconds: float) -> None:
        # Nothing is ever sent on a link: it can be read only once its other end is gone.
        poll = select.poll()
        for link in self._links.values():
            poll.register(link, select.POLLIN)
        ready = {handle for handle, _ in poll.poll(0)}
        dead = [peer for peer, link in self._links.items() if link.fileno() in ready]
        # The leader alone has links to all: it writes down who died before it ends of it.
        known = self._flags[DEAD * FLAG_STRIDE]
        if known == 0 and dead and self.index == 0:
            self._flags[DEAD * FLAG_STRIDE] = known = dead[0] + 1
        if (known or dead) and self._least(flag) < count:
            rank = self._ranks[known - 1 if known else dead[0]]
            raise PeerError(
                f"rank {rank} (host {platform.node()}) died while rank {self._ranks[self.index]} waited for it"
            )
        if waited_seconds > self._limit:
            flags = {self._ranks[p]: self._flags[p * self._words + flag * FLAG_STRIDE] for p in range(self.size)}
            late = ", ".join(str(rank) for rank, reached in flags.items() if reached < count)
            raise PeerError(f"rank {late} did not come within {self._limit:.0f} s")

    # ---- a bucket's reduction -----------------------------------------------------------------------

    def open(self) -> None:
        self._wait(CLOSED, self._counts[CLOSED])

    def launch(self, bucket: int) -> None:
        self._queue.append(bucket)
        self._raise_flag(LAUNCHED)
        self._numbers[bucket] = self._counts[LAUNCHED]
        self._advance()

    def complete(self, bucket: int) -> None:
        number = self._numbers[bucket]
        if self._least(SUMMED) >= number:
            return
        begin, waited = time.perf_counter(), self.waiting_seconds
        with self.recorder.waiting():
            while self._counts[SUMMED] + len(self._flying) < number:
                self._wait(LAUNCHED, self._counts[LAUNCHED] - len(self._queue) + 1)
                self._advance()
            while self._counts[SUMMED] < number:
                self._flying.popleft()()
                self._raise_flag(SUMMED)
            self._wait(SUMMED, number)
        self.waiting_seconds = waited + time.perf_counter() - begin

    def _advance(self) -> None:
        """Sum this rank's slice of every bucket that all ranks have launched."""
        begin = time.perf_counter()
        there = max(0, self._least(LAUNCHED) - (self._counts[LAUNCHED] - len(self._queue)))
        for bucket in self._queue[:there]:
            with self.recorder.reducing(bucket):
                mine = self._sum(bucket)
            if self._between is None:
                self._raise_flag(SUMMED)
            else:
                self._flying.append(self._between.begin(mine))
        del self._queue[:there]
        self.waiting_seconds += time.perf_counter() - begin

    def _sum(self, bucket: int) -> torch.Tensor:
        start, stop = self._slices[bucket][self.index]
        parts = [slots[bucket][start:stop] for slots in self._all_slots]
        mine = parts[self.index]
        if self.size == 1:
            return mine
        # In rank order whoever sums: ((0 + 1) + 2) + …, and the last sum lands in the owner's slot.
        total = parts[0]
        for peer in range(1, self.size):
            total = torch.add(total, parts[peer], out=mine if peer == self.size - 1 else None)
        return mine

    def sums(self, bucket: int) -> Sequence[Part]:
        return [
            Part(start, stop, self._all_slots[peer][bucket][start:stop])
            for peer, (start, stop) in enumerate(self._slices[bucket])
            if stop > start
        ]

    def own(self, bucket: int) -> Part:
        start, stop = self._slices[bucket][self.index]
        if self._between is not None:
            start, stop = share(start, stop, self._between.size, self._between.index)
        return Part(start, stop, self.slots[bucket][start:stop])

    def scale(self, factor: float) -> None:
        for slot, slices in zip(self.slots, self._slices, strict=True):
            start, stop = slices[self.index]
            slot[start:stop].mul_(factor)
        self._raise_flag(SCALED)
        self._wait(SCALED, self._counts[SCALED])

    def gather(self, bucket: int) -> None:
        for peer, (start, stop) in enumerate(self._slices[bucket]):
            if peer != self.index:
                self.slots[bucket][start:stop].copy_(self._all_slots[peer][bucket][start:stop])

    def close(self) -> None:
        self._raise_flag(CLOSED)

    # ---- scalars and weights ------------------------------------------------------------------------

    def measure(self, kind: int, values: torch.Tensor) -> None:
        turn = self._counts[MEASURED + kind] % 2
        self._scalars[self.index][kind, turn, : len(values)] = values
        self._lengths[kind] = len(values)
        self._raise_flag(MEASURED + kind)

    def measured(self, kind: int) -> list[float]:
        count = self._counts[MEASURED + kind]
        self._wait(MEASURED + kind, count)
        total = self._scalars[0][kind, (count - 1) % 2, : self._lengths[kind]].clone()
        for peer in range(1, self.size):
            total += self._scalars[peer][kind, (count - 1) % 2, : self._lengths[kind]]
        return total.tolist() if self._between is None else self._between.measure(total.tolist())


def _slots(mapping: mmap.mmap, slotting: Slotting, region: int) -> list[torch.Tensor]:
    start = region * slotting.region_bytes
    return [
        torch.frombuffer(mapping, dtype=dtype, count=size, offset=start + offset)
        for size, dtype, offset in zip(slotting.sizes, slotting.dtypes, slotting.offsets, strict=True)
    ]


def _scalars(mapping: mmap.mmap, slotting: Slotting, region: int) -> torch.Tensor:
    """float64 [kind, turn, scalar]"""
    count = NUM_MEASURES * 2 * slotting.num_scalars
    offset = region * slotting.region_bytes + slotting.scalars_offset
    flat = torch.frombuffer(mapping, dtype=torch.float64, count=count, offset=offset)
    return flat.view(NUM_MEASURES, 2, slotting.num_scalars)


def _slice(length: int, size: int, index: int) -> tuple[int, int]:
    """[start, stop) of a rank's slice; cut at multiples of 32 elements: no cache line has two writers."""
    blocks = -(-length // 32)
    return min(length, blocks * index // size * 32), min(length, blocks * (index + 1) // size * 32)
