"""Ring over shared memory: the ranks of one host read each other's blocks where they lie.

region   one rank's part of the mapping: its flags, then areas of which only what is used is ever reserved
flag     an int64 that only its owner writes and that only grows
publish  put a block where the other ranks read it, in one of two areas alternately
sum      what the other ranks have added up for a rank, in one of two areas of that rank's region alternately
Law: a block stays unchanged until all have read it. A rank that publishes for the third time has read every second
block, and each of these was published after its rank had read every first one. So two areas are enough, and no rank
has to say what it has read. One rank at a time writes a sum, in the order of the ring (`ACCUMULATED`); two areas are
enough for the same reason.

Nothing is sent: of the 6 (N−1) · B · H · L/N elements of a layer, each rank copies its own K and V twice, and adds to
the sums of others in place. The order of addition is that of messages, so both give the same bits. Like the shared
memory transport, this needs the order of plain stores on x86-64.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.polling import wait_until
from fourfold.parts.comm.reduce.shared_memory.layout import ALIGNMENT_BYTES, FLAG_STRIDE
from fourfold.parts.comm.ring.protocol import RingAccumulator
from fourfold.words.errors import DivergenceError, PeerError, Problem

PUBLISHED, ACCUMULATED, LENGTHS = range(3)  # flags; LENGTHS are two words, the bytes of each published area
AREA_BYTES = 2**34  # of addresses, not of memory
REGION_BYTES = ALIGNMENT_BYTES + 4 * AREA_BYTES
BLOCK_AREAS, SUM_AREAS = 0, 2  # areas, two of each


def total_bytes(size: int) -> int:
    """Bytes of the growing memory of `size` ranks."""
    return size * REGION_BYTES


class RingPlace(NamedTuple):
    """A rank's index in a ring, and the global ranks of the ring."""

    ring_index: int
    ranks: tuple[int, ...]


class RingOverSharedMemory:
    """See `RingGroup`.

    handle       growing memory of `total_bytes`, which this object then owns
    check_peers  called now and then while this rank waits; raises PeerError if a rank has died
    """

    name = "shared memory"

    def __init__(
        self,
        handle: int,
        place: RingPlace,
        meter: CommMeter,
        *,
        check_peers: Callable[[], None],
        time_limit_seconds: float = 1800.0,
    ) -> None:
        self.index, self._ranks = place
        self.size, self.meter = len(place.ranks), meter
        self.check_peers, self._time_limit_seconds = check_peers, time_limit_seconds
        self._memory = _GrowingMemory(handle)
        self._flags = memoryview(self._memory.mapping).cast("B").cast("q")
        self._flag_counts = [0, 0]
        self._num_accumulators = 0

    # ---- blocks --------------------------------------------------------------------------------------

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        local_block = self._publish(parts)
        yield self.index, local_block
        for hop in range(1, self.size):
            owner = (self.index - hop) % self.size
            yield owner, self._read_peer(owner, local_block)

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        local_block = self._publish(parts)
        return [self._read_peer(peer, local_block).clone() for peer in range(self.size)]

    def all_gather_uneven(self, row: Tensor) -> Sequence[Tensor]:
        """The rows of all ranks, each of its own length; they may be read until the next exchange but one."""
        self._publish((row,))
        count = self._flag_counts[PUBLISHED]
        area, rows = (count - 1) % 2, []
        for peer in range(self.size):
            self._wait_flag(PUBLISHED, count, peer)
            num_bytes = self._flags[self._flag_word(peer, LENGTHS) + area]
            rows.append(self._memory.view(peer, BLOCK_AREAS + area, num_bytes // row.element_size(), row.dtype))
        return rows

    def all_to_all(self, parts: Tensor) -> Tensor:
        local_block = self._publish((parts,))
        return torch.stack([self._read_peer(peer, local_block).view_as(parts)[self.index] for peer in range(self.size)])

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        self._num_accumulators += 1
        return _SharedMemoryAccumulator(self, num_elements, dtype)

    def _publish(self, parts: Sequence[Tensor]) -> Tensor:
        """Put this rank's block where all ranks read it; returns it."""
        count, num_elements = self._flag_counts[PUBLISHED], sum(part.numel() for part in parts)
        block = self._memory.view(self.index, BLOCK_AREAS + count % 2, num_elements, parts[0].dtype)
        start = 0
        for part in parts:
            block[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()
        self._flags[self._flag_word(self.index, LENGTHS) + count % 2] = block.nbytes
        self._increment_flag(PUBLISHED)
        return block

    def _read_peer(self, peer: int, local_block: Tensor) -> Tensor:
        """A peer's current block; `local_block` is this rank's, of the same length."""
        count = self._flag_counts[PUBLISHED]
        area = (count - 1) % 2
        self._wait_flag(PUBLISHED, count, peer)
        length = self._flags[self._flag_word(peer, LENGTHS) + area]
        if length != local_block.nbytes:
            got = f"rank {self._ranks[peer]} has {length} bytes, rank {self._ranks[self.index]} {local_block.nbytes}"
            need = "the same attention, of the same sizes, on every rank of a sequence"
            raise DivergenceError(Problem(got, need), where="attention over the sequence axis")
        return self._memory.view(peer, BLOCK_AREAS + area, local_block.numel(), local_block.dtype)

    # ---- flags ---------------------------------------------------------------------------------------

    def _flag_word(self, peer: int, flag: int) -> int:
        return peer * REGION_BYTES // 8 + flag * FLAG_STRIDE

    def _increment_flag(self, flag: int) -> None:
        self._flag_counts[flag] += 1
        self._flags[self._flag_word(self.index, flag)] = self._flag_counts[flag]

    def _wait_flag(self, flag: int, count: int, peer: int) -> None:
        """Wait until a peer's flag has reached `count`."""
        word = self._flag_word(peer, flag)

        def check(waited_seconds: float) -> None:
            self.check_peers()
            if waited_seconds > self._time_limit_seconds:
                raise PeerError(f"rank {self._ranks[peer]} did not come within {self._time_limit_seconds:.0f} s")

        self.meter.waiting_seconds += wait_until(lambda: self._flags[word] >= count, check, self.meter.recorder)


class _SharedMemoryAccumulator:
    """See `RingAccumulator`."""

    def __init__(self, ring: RingOverSharedMemory, num_elements: int, dtype: torch.dtype) -> None:
        self._ring, self._num_elements, self._dtype = ring, num_elements, dtype
        self._number, self._hop = ring._num_accumulators - 1, 0

    def receive(self) -> Tensor:
        self._hop += 1
        total = self._view((self._ring.index - self._hop) % self._ring.size)
        if self._hop == 1:
            return total.zero_()
        self._wait_for_left(self._hop - 1)
        return total

    def send(self) -> None:
        self._ring._increment_flag(ACCUMULATED)

    def result(self) -> Tensor:
        self._wait_for_left(self._ring.size - 1)
        return self._view(self._ring.index).clone()

    def _wait_for_left(self, hop: int) -> None:
        left = (self._ring.index - 1) % self._ring.size
        self._ring._wait_flag(ACCUMULATED, self._number * (self._ring.size - 1) + hop, left)

    def _view(self, owner: int) -> Tensor:
        return self._ring._memory.view(owner, SUM_AREAS + self._number % 2, self._num_elements, self._dtype)


class _GrowingMemory:
    """Memory whose areas are reserved only as far as they have been used."""

    def __init__(self, handle: int) -> None:
        self._handle = os.dup(handle)
        # Not `__del__`, which at the end of the interpreter finds the names of this module already gone.
        weakref.finalize(self, memory.close_shared, self._handle)
        self.mapping: mmap.mmap = memory.map_shared(handle)
        self._reserved: dict[tuple[int, int], int] = {}

    def view(self, region: int, area: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The first elements of an area. Raises MemoryUnavailable."""
        num_bytes = num_elements * dtype.itemsize
        start = region * REGION_BYTES + ALIGNMENT_BYTES + area * AREA_BYTES
        if num_bytes > AREA_BYTES:
            need = f"at most {AREA_BYTES / 2**30:.0f} GiB of keys and values a rank"
            raise memory.MemoryUnavailable(Problem(f"{num_bytes} bytes", need, 'transport = "gloo"'))
        if num_bytes > self._reserved.get((region, area), 0):
            memory.grow(self._handle, start, num_bytes)
            self._reserved[region, area] = num_bytes
        return torch.frombuffer(self.mapping, dtype=dtype, count=num_elements, offset=start)
