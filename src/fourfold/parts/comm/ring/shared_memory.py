"""Ring over shared memory: the ranks of one host read each other's blocks where they lie.

region   one rank's part of the memory, with its flags and areas; see `SharedRegions`
publish  put a block where the other ranks read it, in one of two areas alternately
sum      what the other ranks have added up for a rank, in one of two areas of that rank's region alternately
Law: a block stays unchanged until all have read it. A rank that publishes for the third time has read every second
block, and each of these was published after its rank had read every first one. So two areas are enough, and no rank
has to say what it has read. One rank at a time writes a sum, in the order of the ring (`ACCUMULATED`); two areas are
enough for the same reason.

Nothing is sent: of the 6 (N−1) · B · H · L/N elements of a layer, each rank copies its own K and V twice, and adds to
the sums of others in place. The order of addition is that of messages, so both give the same bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.ring.protocol import RingAccumulator
from fourfold.parts.comm.shared_regions import SharedRegions
from fourfold.words.errors import DivergenceError, Problem

PUBLISHED, ACCUMULATED, LENGTHS = range(3)  # flags; LENGTHS are two words, the bytes of each published area
BLOCK_AREAS, SUM_AREAS = 0, 2  # areas, two of each


class RingOverSharedMemory:
    """See `RingGroup`."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions) -> None:
        self.regions, self.meter = regions, regions.meter
        self.index, self.size = regions.place.index, regions.place.size
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
            self.regions.wait_flag(PUBLISHED, count, peer)
            num_bytes = self._read_length(peer, area)
            rows.append(self.regions.view(peer, BLOCK_AREAS + area, num_bytes // row.element_size(), row.dtype))
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
        block = self.regions.view(self.index, BLOCK_AREAS + count % 2, num_elements, parts[0].dtype)
        start = 0
        for part in parts:
            block[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()
        self.regions.words[self.regions.word(self.index, LENGTHS, count % 2)] = block.nbytes
        self._increment_flag(PUBLISHED)
        return block

    def _read_peer(self, peer: int, local_block: Tensor) -> Tensor:
        """A peer's current block; `local_block` is this rank's, of the same length."""
        count = self._flag_counts[PUBLISHED]
        area = (count - 1) % 2
        self.regions.wait_flag(PUBLISHED, count, peer)
        length = self._read_length(peer, area)
        if length != local_block.nbytes:
            ranks = self.regions.place.ranks
            got = f"rank {ranks[peer]} has {length} bytes, rank {ranks[self.index]} {local_block.nbytes}"
            need = "the same attention, of the same sizes, on every rank of a sequence"
            raise DivergenceError(Problem(got, need), where="attention over the sequence axis")
        return self.regions.view(peer, BLOCK_AREAS + area, local_block.numel(), local_block.dtype)

    # ---- flags ---------------------------------------------------------------------------------------

    def _read_length(self, peer: int, area: int) -> int:
        return self.regions.words[self.regions.word(peer, LENGTHS, area)]

    def _increment_flag(self, flag: int) -> None:
        self._flag_counts[flag] += 1
        self.regions.words[self.regions.word(self.index, flag)] = self._flag_counts[flag]


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
        self._ring.regions.wait_flag(ACCUMULATED, self._number * (self._ring.size - 1) + hop, left)

    def _view(self, owner: int) -> Tensor:
        return self._ring.regions.view(owner, SUM_AREAS + self._number % 2, self._num_elements, self._dtype)
