"""Memory: allocates every long-lived buffer, and decides where it is.

flat     one-dimensional, allocated once per run
private  seen by this process only, in huge pages if the system grants them
mapping  memory that several processes of a host see: anonymous (memfd), so it vanishes with its last user
pool     memory that is lent again and again; a loan ends when no tensor in it is alive any more
use      bytes of the buffers that were allocated here and are alive, and of the tensors of tracked owners
Law: long-lived buffers are made here, once per run. All other modules hold views of them.
"""

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from fourfold.environment import malloc
from fourfold.words.errors import FourfoldError, Problem

PAGE_BYTES = 4096
# Smaller buffers do not repay a mapping of their own, which is rounded up to pages and zeroed by page faults.
HUGE_PAGE_MIN_BYTES = 2 * 2**20
MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has no name for it before 3.13
PAGE_PRESENT, PAGE_SWAPPED, PAGE_OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
GLIBC_TRIM_BYTES, GLIBC_MMAPS = 2**17, 2**16  # their values at the start: DEFAULT_TRIM_THRESHOLD, DEFAULT_MMAP_MAX
PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class MemoryUnavailable(FourfoldError):
    """Shared memory is not available here; the message says why."""


class MemoryUse(NamedTuple):
    """Bytes of long-lived buffers that are alive. The sum over the ranks of a host is the host's use.

    `shared_bytes` counts what this process has made, not what it maps of other processes. Growing memory
    (`create_growing`) is not counted.
    """

    private_bytes: int
    shared_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.private_bytes + self.shared_bytes


_kept_for_good = threading.Event()
"""Whether a step of this process has ended, after which freed memory is kept."""
# Entering and removing a key are single operations of a dict: threads and the garbage collector do both.
_live_buffers: dict[int, MemoryUse] = {}
_buffer_ids = itertools.count()
_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()
# Shared memory that this process has made and not mapped yet, by device and inode. A dict, not a set: `pop` is atomic
# and says whether the key was there. (In tests ranks are threads that map at the same time.)
_unmapped: dict[tuple[int, int], bool] = {}


def memory_use() -> MemoryUse:
    """The bytes of long-lived buffers in this process."""
    alive = list(_live_buffers.values())
    owned_bytes = sum(tensor.nbytes for owner in list(_owners) for tensor in owner.owned_tensors())
    return MemoryUse(owned_bytes + sum(each.private_bytes for each in alive), sum(each.shared_bytes for each in alive))


def track_owner(owner: Any) -> None:
    """From now on `memory_use` counts `owner.owned_tensors()` too, as long as the owner lives: tensors that were not
    allocated here, such as the states of torch's optimizers.
    """
    _owners.add(owner)


def _track_buffer(buffer: object, num_bytes: MemoryUse) -> None:
    """Count a buffer until it is freed."""
    buffer_id = next(_buffer_ids)
    _live_buffers[buffer_id] = num_bytes
    weakref.finalize(buffer, functools.partial(_live_buffers.pop, buffer_id)).atexit = False


def _tracked(flat: torch.Tensor) -> torch.Tensor:
    _track_buffer(flat.untyped_storage(), MemoryUse(flat.nbytes, 0))
    return flat


def allocate_private(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat of zeros [num_elements] in private memory."""
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
    """Lends flats. A loan ends when its storage is freed, that is when the last view of it is gone.

    On a CPU the memory is kept for the next loan. On other devices torch's allocator does that.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self.num_in_use = 0
        """Loans that have not ended."""
        self.peak_in_use = 0

    def acquire(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat [num_elements] with undefined values."""
        mapping = self._pop_free(num_elements * dtype.itemsize) if device.type == "cpu" else None
        if mapping is None:
            flat = _tracked(torch.empty(num_elements, dtype=dtype, device=device))
        else:
            flat = torch.frombuffer(mapping, dtype=dtype, count=num_elements)
        self.num_in_use += 1
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)
        weakref.finalize(flat.untyped_storage(), self._release, mapping).atexit = False
        return flat

    def _pop_free(self, num_bytes: int) -> mmap.mmap:
        """The smallest free mapping that is large enough. If there is none, a new one replaces the largest free one."""
        self._free.sort(key=len)
        for index, mapping in enumerate(self._free):
            if len(mapping) >= num_bytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop()
        return _map_huge_pages(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)

    def _release(self, mapping: mmap.mmap | None) -> None:
        self.num_in_use -= 1
        if mapping is not None:
            self._free.append(mapping)


def allocate_pinned(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat of zeros [num_elements] in pinned host memory, which a GPU reads and writes directly."""
    return _tracked(torch.zeros(num_elements, dtype=dtype, pin_memory=True))


def _create_anonymous() -> int:
    if not hasattr(os, "memfd_create"):
        raise MemoryUnavailable(Problem(f"no memfd on {sys.platform}", "Linux", 'transport = "gloo"'))
    return os.memfd_create("fourfold", os.MFD_CLOEXEC)


def create_shared(num_bytes: int) -> int:
    """A file descriptor of anonymous shared memory, fully reserved. Raises MemoryUnavailable."""
    handle = _create_anonymous()
    try:
        # Reserve it now, so that a lack of memory is an error here and not a SIGBUS in the middle of a step.
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        os.close(handle)
        need = f"{num_bytes / 2**20:.0f} MiB of shared memory for the gradients of this host's ranks"
        raise MemoryUnavailable(Problem(str(error), need, 'fewer ranks a host, or transport = "gloo"')) from None
    _unmapped[_memory_id(handle)] = True
    return handle


def create_growing(num_bytes: int) -> int:
    """A file descriptor of anonymous shared memory with nothing reserved yet; see `grow`. Raises MemoryUnavailable."""
    handle = _create_anonymous()
    os.ftruncate(handle, num_bytes)
    return handle


def grow(fd: int, start: int, num_bytes: int) -> None:
    """Reserve [start, start + num_bytes) of growing memory; reserved parts keep their contents."""
    try:
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        need = f"{num_bytes / 2**20:.0f} MiB of shared memory for messages between the ranks of this host"
        raise MemoryUnavailable(Problem(str(error), need, 'shorter sequences, or transport = "gloo"')) from None


def close_shared(fd: int) -> None:
    """Close a descriptor of `create_shared` or `create_growing`."""
    _unmapped.pop(_memory_id(fd), None)
    os.close(fd)


def map_shared(fd: int) -> mmap.mmap:
    """Map the memory of a descriptor, and close the descriptor."""
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    if _unmapped.pop(_memory_id(fd), False):
        _track_buffer(mapping, MemoryUse(0, len(mapping)))
    os.close(fd)
    return mapping


def map_region(fd: int, start: int, num_bytes: int) -> mmap.mmap:
    """Map a part of growing memory. `start` is a multiple of the page size."""
    return mmap.mmap(fd, num_bytes, offset=start)


def map_copy_on_write(fd: int, start: int, num_bytes: int) -> mmap.mmap:
    """Map a part of growing memory, to read what others write; what is written here, others do not see."""
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    return mmap.mmap(fd, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start)


def reset_copy_on_write(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    """Forget what this process has written into a part of `map_copy_on_write`: whole pages from `start` on."""
    pages = _page_flags(mapping, start, num_bytes)
    # Pages that nothing was written into stay mapped: to map them again takes longer than to copy them.
    is_own = (pages & PAGE_PRESENT != 0) & (pages & PAGE_OF_FILE == 0) | (pages & PAGE_SWAPPED != 0)
    if len(pages) * mmap.PAGESIZE < num_bytes or is_own.any():
        mapping.madvise(mmap.MADV_DONTNEED, start, num_bytes)


def _page_flags(mapping: mmap.mmap, start: int, num_bytes: int) -> np.ndarray:
    """The kernel's word for each page (Documentation/admin-guide/mm/pagemap.rst); none where it does not tell."""
    address = np.frombuffer(mapping, dtype=np.uint8, count=1, offset=start).ctypes.data
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            content = os.pread(file.fileno(), 8 * (num_bytes // mmap.PAGESIZE), 8 * (address // mmap.PAGESIZE))
    except OSError:
        return np.empty(0, dtype=np.uint64)
    return np.frombuffer(content, dtype=np.uint64)


def shrink(fd: int, start: int, num_bytes: int) -> None:
    """Give the memory of a part of growing memory back to the system; its content is zeros then."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_int(fd), ctypes.c_int(PUNCH_HOLE), ctypes.c_long(start), ctypes.c_long(num_bytes)]
    if libc.fallocate(*arguments):
        raise OSError(ctypes.get_errno(), "fallocate")


def _memory_id(fd: int) -> tuple[int, int]:
    """Device and inode: equal for all descriptors of the same memory."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def tune_freed_memory(device: torch.device, num_steps: int) -> None:
    """After each step: on CPUs, set how much freed memory the C library keeps."""
    if device.type != "cpu":
        return
    if num_steps == 1:
        # Not before: the first step makes optimizer states, which would lie between gradients that are freed after it.
        _kept_for_good.set()
        keep_freed_memory()
    elif num_steps == 2:
        trim_freed_memory()


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory instead of returning it to the system. Returns whether it agreed.

    A backward allocates and frees the same large gradients in every step. As separate mappings each of them pays for
    page faults and zeroing again (`docs/measured-notes.md`, "Freed memory"). A user's own setting is respected
    (`environment.malloc`).
    """
    mallopt = _malloc("mallopt")
    if mallopt is None or malloc.is_user_configured(os.environ):
        return False
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, 2**31 - 1))


@contextlib.contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Within, the C library keeps freed memory, as after a first step; then it returns it, unless one has been made."""
    is_kept = device.type == "cpu" and not _kept_for_good.is_set() and keep_freed_memory()
    try:
        yield
    finally:
        if is_kept and not _kept_for_good.is_set() and (mallopt := _malloc("mallopt")) is not None:
            mallopt(TRIM_THRESHOLD, GLIBC_TRIM_BYTES)
            mallopt(MMAP_MAX, GLIBC_MMAPS)
            trim_freed_memory()


def trim_freed_memory() -> None:
    """Return free memory to the system once, after the first steps: they leave holes between lasting allocations."""
    trim = _malloc("malloc_trim")
    if trim is not None:
        trim(0)


def _malloc(name: str) -> Callable[..., int] | None:
    """A function of glibc's malloc; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
