"""Neighbours: a link between processes of one host, in shared memory: blocks are read where they lie.

region  one rank's part of the mapping: its flags, then areas of which only what is used is ever reserved
flag    an int64 that only its owner writes and that only grows
post    what a rank shows the others next, in one of two areas by turns
sum     what the others have added up for a rank, in one of two areas of that rank's region by turns
Law: a post lies still until all have read it: who posts a third time has read all second posts, and each of them was
made after its rank had read all first ones. So the two areas are enough, and nobody says what he has read. A sum
is written by one rank at a time, in the order of the ring (`ADDED`); its second one by turns for the same reason.

Nobody sends anything: of the 6 (N−1) · B · H · L/N elements of a layer each rank copies its own K and V twice, and adds
to the sums of others in place. The order of addition is that of messages, so both give the same bits. As `shared`, this
needs the order of plain stores on x86-64.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.links import RingAccumulator
from fourfold.parts.comm.shared import LIVENESS_SECONDS, POLL_SECONDS, SPINS, YIELD_SECONDS
from fourfold.parts.comm.slotting import ALIGNMENT_BYTES, FLAG_STRIDE
from fourfold.words.errors import DivergenceError, PeerError, Problem
from fourfold.words.spans import SILENT

POSTED, ADDED, LENGTHS = range(3)  # flags; LENGTHS are two words, in bytes, one for each turn
AREA_BYTES = 2**34  # of addresses, not of memory
REGION_BYTES = ALIGNMENT_BYTES + 4 * AREA_BYTES
POSTS, SUMS = 0, 2  # areas, two of each


def total_bytes(size: int) -> int:
    """Of the growing memory of `size` ranks."""
    return size * REGION_BYTES


class Place(NamedTuple):
    """A rank's place in a link: `here`, its index among `ranks`, the global ranks of all."""

    here: int
    ranks: tuple[int, ...]


class Neighbours:
    """See `links.Link`. `handle`: growing memory of `total_bytes`, which this takes over; `look`: raises PeerError
    where a rank has died; asked now and then while this rank waits."""

    name = "shared memory"

    def __init__(
        self, handle: int, place: Place, *, look: Callable[[], None], time_limit_seconds: float = 1800.0
    ) -> None:
        self.index, self._ranks = place
        self.size = len(place.ranks)
        self.sent_bytes, self.waiting_seconds, self.recorder = 0.0, 0.0, SILENT
        self.look, self._limit = look, time_limit_seconds
        self._memory = _Growing(handle)
        self._flags = memoryview(self._memory.mapping).cast("B").cast("q")
        self._counts = [0, 0]
        self._rounds = 0

    # ---- what a rank shows ---------------------------------------------------------------------------

    def visit(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        mine = self._post(parts)
        yield self.index, mine
        for hop in range(1, self.size):
            owner = (self.index - hop) % self.size
            yield owner, self._read(owner, mine)

    def gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        mine = self._post(parts)
        return [self._read(peer, mine).clone() for peer in range(self.size)]

    def swap(self, parts: Tensor) -> Tensor:
        mine = self._post((parts,))
        return torch.stack([self._read(peer, mine).view_as(parts)[self.index] for peer in range(self.size)])

    def carry(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        self._rounds += 1
        return _Sums(self, num_elements, dtype)

    def _post(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's block, where all see it."""
        count, num_elements = self._counts[POSTED], sum(part.numel() for part in parts)
        block = self._memory.view(self.index, POSTS + count % 2, num_elements, parts[0].dtype)
        start = 0
        for part in parts:
            block[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()
        self._flags[self._word(self.index, LENGTHS) + count % 2] = block.nbytes
        self._raise_flag(POSTED)
        return block

    def _read(self, peer: int, mine: Tensor) -> Tensor:
        """A peer's block in this round, which is like this rank's."""
        count = self._counts[POSTED]
        turn = (count - 1) % 2
        self._wait(POSTED, count, peer)
        length = self._flags[self._word(peer, LENGTHS) + turn]
        if length != mine.nbytes:
            got = f"rank {self._ranks[peer]} shows {length} bytes, rank {self._ranks[self.index]} {mine.nbytes}"
            need = "the same attention, of the same sizes, on every rank of a sequence"
            raise DivergenceError(Problem(got, need), where="attention over the sequence axis")
        return self._memory.view(peer, POSTS + turn, mine.numel(), mine.dtype)

    # ---- flags ---------------------------------------------------------------------------------------

    def _word(self, peer: int, flag: int) -> int:
        return peer * REGION_BYTES // 8 + flag * FLAG_STRIDE

    def _raise_flag(self, flag: int) -> None:
        self._counts[flag] += 1
        self._flags[self._word(self.index, flag)] = self._counts[flag]

    def _wait(self, flag: int, count: int, peer: int) -> None:
        """Until a peer's flag has reached `count`: spin, then yield, then doze, looking for dead peers."""
        word = self._word(peer, flag)
        for _ in range(SPINS):
            if self._flags[word] >= count:
                return
        begin = looked = time.perf_counter()
        with self.recorder.waiting():
            while self._flags[word] < count:
                now = time.perf_counter()
                if now - begin < YIELD_SECONDS:
                    os.sched_yield()
                    continue
                time.sleep(POLL_SECONDS)
                if now - looked > LIVENESS_SECONDS:
                    looked = now
                    self.look()
                    if now - begin > self._limit:
                        raise PeerError(f"rank {self._ranks[peer]} did not come within {self._limit:.0f} s")
        self.waiting_seconds += time.perf_counter() - begin


class _Sums:
    """See `links.Carry`."""

    def __init__(self, link: Neighbours, num_elements: int, dtype: torch.dtype) -> None:
        self._link, self._num_elements, self._dtype = link, num_elements, dtype
        self._round, self._hop = link._rounds - 1, 0

    def take(self) -> Tensor:
        self._hop += 1
        held = self._view((self._link.index - self._hop) % self._link.size)
        if self._hop == 1:
            return held.zero_()
        self._wait_for_left(self._hop - 1)
        return held

    def give(self) -> None:
        self._link._raise_flag(ADDED)

    def own(self) -> Tensor:
        self._wait_for_left(self._link.size - 1)
        return self._view(self._link.index).clone()

    def _wait_for_left(self, hop: int) -> None:
        left = (self._link.index - 1) % self._link.size
        self._link._wait(ADDED, self._round * (self._link.size - 1) + hop, left)

    def _view(self, owner: int) -> Tensor:
        return self._link._memory.view(owner, SUMS + self._round % 2, self._num_elements, self._dtype)


class _Growing:
    """Regions of memory that are reserved as far as they have been used."""

    def __init__(self, handle: int) -> None:
        self._handle = os.dup(handle)
        self.mapping: mmap.mmap = memory.map_shared(handle)
        self._reserved: dict[tuple[int, int], int] = {}

    def __del__(self) -> None:
        memory.close_shared(self._handle)

    def view(self, region: int, area: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The first elements of an area, a flat. Raises MemoryUnavailable."""
        num_bytes = num_elements * dtype.itemsize
        start = region * REGION_BYTES + ALIGNMENT_BYTES + area * AREA_BYTES
        if num_bytes > AREA_BYTES:
            need = f"at most {AREA_BYTES / 2**30:.0f} GiB of keys and values a rank"
            raise memory.MemoryUnavailable(Problem(f"{num_bytes} bytes", need, 'transport = "gloo"'))
        if num_bytes > self._reserved.get((region, area), 0):
            memory.grow(self._handle, start, num_bytes)
            self._reserved[region, area] = num_bytes
        return torch.frombuffer(self.mapping, dtype=dtype, count=num_elements, offset=start)
