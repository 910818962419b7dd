"""Memory: the owner of every long-lived buffer. It decides where a buffer lives; nobody else knows.

flat     one-dimensional, allocated once per run
private  seen by this process only, backed by huge pages where the system grants them
mapping  memory that several processes of a host see: anonymous (memfd), so it vanishes with its last user
slot     memory that is lent again and again, each time until nobody holds a tensor in it any more
account  what has been handed out here and is still alive, and what others hold who have asked to be counted
Law: long-lived buffers are made here, once per run; everybody else holds views.
"""

import ctypes
import functools
import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from fourfold.environment import malloc
from fourfold.words.errors import FourfoldError, Problem

PAGE_BYTES = 4096
# Below this, a mapping of its own (rounded up to pages, zeroed by faults) costs more than it brings.
HUGE_PAGE_MIN_BYTES = 2 * 2**20


class MemoryUnavailable(FourfoldError):
    """Shared memory cannot be had here; the message says why."""


class MemoryUse(NamedTuple):
    """Bytes of long-lived buffers that are alive. Added up over the ranks of a host they are the host's.

    `shared` are those that this process has made: mappings of what another process has made do not count again.
    What grows as it is used (`create_growing`) is not counted.
    """

    private_bytes: int
    shared_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.private_bytes + self.shared_bytes


class TensorOwner(Protocol):
    """Who has long-lived buffers that could not be made here, such as the states of torch's optimizers."""

    def owned_tensors(self) -> Iterable[torch.Tensor]:
        """Those there are at this moment."""
        ...


# By number, so that a buffer is entered and leaves in one operation of a dict: threads and the garbage collector do so.
_live_buffers: dict[int, MemoryUse] = {}
_buffer_ids = itertools.count()
_owners: "weakref.WeakSet[TensorOwner]" = weakref.WeakSet()
# Shared memory made by this process that has not been mapped yet, by device and inode. No set: who takes a key out of
# a dict is told so in the same operation, and ranks that are threads map at the same time.
_unmapped: dict[tuple[int, int], bool] = {}


def memory_use() -> MemoryUse:
    """What this process holds of long-lived buffers."""
    alive = list(_live_buffers.values())
    others = sum(tensor.nbytes for holder in list(_owners) for tensor in holder.owned_tensors())
    return MemoryUse(others + sum(each.private_bytes for each in alive), sum(each.shared_bytes for each in alive))


def track_owner(owner: TensorOwner) -> None:
    """From now on, and while it lives, `held` counts what the holder has too."""
    _owners.add(owner)


def _track_buffer(buffer: object, num_bytes: MemoryUse) -> None:
    """Count a buffer until it is gone."""
    number = next(_buffer_ids)
    _live_buffers[number] = num_bytes
    weakref.finalize(buffer, functools.partial(_live_buffers.pop, number)).atexit = False


def _tracked(flat: torch.Tensor) -> torch.Tensor:
    _track_buffer(flat.untyped_storage(), MemoryUse(flat.nbytes, 0))
    return flat


def allocate_private(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat of zeros [num_elements] that only this process sees."""
    num_bytes = num_elements * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_PAGE_MIN_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _tracked(torch.zeros(num_elements, dtype=dtype, device=device))
    return torch.frombuffer(_map_huge_pages(num_bytes), dtype=dtype, count=num_elements)


def _map_huge_pages(num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    _track_buffer(mapping, MemoryUse(num_bytes, 0))
    return mapping


class BufferPool:
    """Flats that are lent. A loan ends by itself when nobody holds its storage, through whatever view.

    On a CPU the memory is kept for the next loan; on other devices torch's own allocator does that.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self.num_in_use = 0
        """How many loans have not ended."""
        self.peak_in_use = 0

    def acquire(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat [num_elements]; what it holds is undefined."""
        room = self._pop_free(num_elements * dtype.itemsize) if device.type == "cpu" else None
        if room is None:
            flat = _tracked(torch.empty(num_elements, dtype=dtype, device=device))
        else:
            flat = torch.frombuffer(room, dtype=dtype, count=num_elements)
        self.num_in_use += 1
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)
        weakref.finalize(flat.untyped_storage(), self._release, room).atexit = False
        return flat

    def _pop_free(self, num_bytes: int) -> mmap.mmap:
        """The least free memory that is large enough; where there is none, the largest makes way for a new one."""
        self._free.sort(key=len)
        for index, room in enumerate(self._free):
            if len(room) >= num_bytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop()
        return _map_huge_pages(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)

    def _release(self, mapping: mmap.mmap | None) -> None:
        self.num_in_use -= 1
        if mapping is not None:
            self._free.append(mapping)


def allocate_pinned(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat of zeros [num_elements] in host memory that a GPU reads and writes without a copy in between."""
    return _tracked(torch.zeros(num_elements, dtype=dtype, pin_memory=True))


def create_shared(num_bytes: int) -> int:
    """A file descriptor of anonymous shared memory, all of it reserved. Raises MemoryUnavailable."""
    if not hasattr(os, "memfd_create"):
        raise MemoryUnavailable(Problem(f"no memfd on {sys.platform}", "Linux", 'transport = "gloo"'))
    handle = os.memfd_create("fourfold", os.MFD_CLOEXEC)
    try:
        # Reserved now, so that a lack of memory is an error here and not a SIGBUS in mid-step.
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        os.close(handle)
        need = f"{num_bytes / 2**20:.0f} MiB of shared memory for the gradients of this host's ranks"
        raise MemoryUnavailable(Problem(str(error), need, 'fewer ranks a host, or transport = "gloo"')) from None
    _unmapped[_memory_id(handle)] = True
    return handle


def create_growing(num_bytes: int) -> int:
    """A file descriptor of anonymous shared memory of which nothing is reserved yet; see `grow`."""
    if not hasattr(os, "memfd_create"):
        raise MemoryUnavailable(Problem(f"no memfd on {sys.platform}", "Linux", 'transport = "gloo"'))
    handle = os.memfd_create("fourfold", os.MFD_CLOEXEC)
    os.ftruncate(handle, num_bytes)
    return handle


def grow(fd: int, start: int, num_bytes: int) -> None:
    """Reserve [start, start + num_bytes) of growing memory; what is reserved already stays as it is."""
    try:
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        need = f"{num_bytes / 2**20:.0f} MiB of shared memory for what the ranks of this host show each other"
        raise MemoryUnavailable(Problem(str(error), need, 'shorter sequences, or transport = "gloo"')) from None


def close_shared(fd: int) -> None:
    """Give back what `create_shared` or `create_growing` made."""
    _unmapped.pop(_memory_id(fd), None)
    os.close(fd)


def map_shared(fd: int) -> mmap.mmap:
    """The mapping behind a descriptor; the descriptor is closed."""
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    if _unmapped.pop(_memory_id(fd), False):
        _track_buffer(mapping, MemoryUse(0, len(mapping)))
    os.close(fd)
    return mapping


def _memory_id(fd: int) -> tuple[int, int]:
    """What all descriptors of the same memory have in common."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed instead of giving it back to the system; True where it agreed.

    A backward pass allocates and frees the same large gradients in every step. As separate mappings each costs
    its pages' faults and zeroing again (`docs/measured.md`, "Freed memory"). A user's own setting is left alone
    (`words.heap`).
    """
    mallopt = _malloc("mallopt")
    if mallopt is None or malloc.is_user_configured(os.environ):
        return False
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def trim_freed_memory() -> None:
    """Give what is free now back to the system, once: the first steps leave holes between what stays."""
    trim = _malloc("malloc_trim")
    if trim is not None:
        trim(0)


def _malloc(name: str) -> Callable[..., int] | None:
    """A function of glibc's malloc, or None where there is another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
