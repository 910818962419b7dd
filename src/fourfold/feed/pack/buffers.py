"""Buffers: memory of batches, used again once a batch is gone.

lent  a buffer that some tensor of a batch still uses
Law: a buffer is lent to one batch at a time: it comes back when no tensor, view or array of the batch is left.

New memory costs a page fault every 4 KiB, which is as much time as to fill it from the page cache.
"""

import mmap
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2**21
MAX_FREE = 8  # of one size; a feed holds a few batches at a time


class BufferPool:
    """Buffers by size. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}

    def lend(self, num_bytes: int) -> Tensor:
        """A tensor of memory with any content: uint8 [num_bytes]. The memory is lent until all views of it are gone."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = _rounded(num_bytes)
        free = self._free.setdefault(size, deque(maxlen=MAX_FREE))
        try:
            memory = free.pop()
        except IndexError:
            memory = _new(size)
        # Views of a tensor keep this array, not the map: when it goes, so has the last of them.
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array)[:num_bytes]


class PinnedBuffers:
    """Buffers in pinned memory, from which copies to a GPU overlap with its work. torch keeps them for further use."""

    def lend(self, num_bytes: int) -> Tensor:
        """A tensor of pinned memory with any content: uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _rounded(num_bytes: int) -> int:
    """A size that batches of about this size share: an eighth more at most."""
    step = max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def _new(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
