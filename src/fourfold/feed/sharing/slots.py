"""Slots: where the batches that the ranks of a host share lie.

chunk   a range of addresses in the memory of these ranks, which each of them maps as a whole
slot    a part of a chunk for one batch; the reader fills it, and then every rank has a view of it
view    a rank's own look at a slot, copy-on-write: what a rank writes into its batch, the others do not see
Law: a slot is filled again only when no tensor of its batch is left on any rank.
"""

import mmap
import os
import weakref
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.words.errors import DataError, Problem

ADDRESS_BYTES = 2**44  # of addresses, not of memory
CHUNK_BYTES = 2**28
LEAST_BYTES = 2**16
MAX_FREE = 8  # slots of one size that keep their memory; a feed has a few batches at a time


class Slot(NamedTuple):
    """`start` and `num_bytes` are those of its addresses."""

    chunk_start: int
    chunk_bytes: int
    start: int
    num_bytes: int


class SlotViews:
    """This rank's views of slots, and which of them are gone."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._chunks: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()

    def view(self, slot: Slot, num_bytes: int) -> Tensor:
        """The first bytes of a slot: uint8 [num_bytes]. The slot is released when no view of it is left."""
        chunk = self._chunks.get(slot.chunk_start)
        if chunk is None:
            chunk = memory.map_copy_on_write(self._handle, slot.chunk_start, slot.chunk_bytes)
            self._chunks[slot.chunk_start] = chunk
        offset, rounded = slot.start - slot.chunk_start, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        array = np.frombuffer(chunk, dtype=np.uint8, count=num_bytes, offset=offset)
        # Tensors keep this array, not the map: when it goes, so has the last of them.
        weakref.finalize(array, _release, chunk, (offset, rounded), self._released, slot.start).atexit = False
        return torch.from_numpy(array)

    def take_released(self) -> list[int]:
        """The starts of the slots of which the last tensor is gone since the last call."""
        return [self._released.popleft() for _ in range(len(self._released))]


def _release(chunk: mmap.mmap, part: tuple[int, int], released: deque[int], start: int) -> None:
    memory.reset_copy_on_write(chunk, *part)
    released.append(start)


class SlotWriter:
    """The slots, as the rank that fills them sees them. `handle`: growing memory of ADDRESS_BYTES."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._chunks: dict[int, mmap.mmap] = {}
        self._slots: dict[int, Slot] = {}
        self._reserved: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._free: dict[int, list[Slot]] = {}
        self._chunk, self._used = Slot(0, 0, 0, 0), 0

    def take(self, num_bytes: int, num_holders: int) -> tuple[Slot, Tensor]:
        """A free slot, and its bytes to be filled: uint8 [num_bytes]. Raises DataError without memory."""
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        slot = free.pop() if free else self._make(size)
        if num_bytes > self._reserved.get(slot.start, 0):
            self._reserve(slot, num_bytes)
        self._holders[slot.start] = num_holders
        chunk = self._chunks[slot.chunk_start]
        offset = slot.start - slot.chunk_start
        return slot, torch.from_numpy(np.frombuffer(chunk, dtype=np.uint8, count=num_bytes, offset=offset))

    def give_back(self, start: int) -> None:
        """One of the ranks that hold a slot has released it."""
        self._holders[start] -= 1
        if self._holders[start]:
            return
        slot = self._slots[start]
        free = self._free[slot.num_bytes]
        if len(free) >= MAX_FREE:  # a loop that kept its batches has let them go
            memory.shrink(self._handle, start, self._reserved.pop(start))
        free.insert(0, slot)  # those with memory are taken first

    def _make(self, size: int) -> Slot:
        if self._used + size > self._chunk.chunk_bytes:
            start, num_bytes = self._chunk.chunk_start + self._chunk.chunk_bytes, max(CHUNK_BYTES, size)
            if start + num_bytes > ADDRESS_BYTES:
                raise _no_memory(size, "no addresses left")
            self._chunk, self._used = Slot(start, num_bytes, start, num_bytes), 0
            self._chunks[start] = memory.map_region(self._handle, start, num_bytes)
        start = self._chunk.chunk_start + self._used
        self._used += size
        slot = self._slots[start] = Slot(self._chunk.chunk_start, self._chunk.chunk_bytes, start, size)
        return slot

    def _reserve(self, slot: Slot, num_bytes: int) -> None:
        num_bytes = min(slot.num_bytes, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        try:
            memory.grow(self._handle, slot.start, num_bytes)
        except memory.MemoryUnavailable as error:
            raise _no_memory(num_bytes, error.problems[0].got) from error
        self._reserved[slot.start] = num_bytes


def _no_memory(num_bytes: int, reason: str) -> DataError:
    need = f"{num_bytes / 2**20:.0f} MiB of shared memory for a batch of the ranks of this host"
    attempt = "a smaller batch_size, batches that are not kept, or ff.Feed(..., shared=False)"
    return DataError(Problem(f"host {os.uname().nodename}: {reason}", need, attempt), where="the feed")
