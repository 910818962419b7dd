"""Host memory: how many bytes this process could still allocate.

available  what the kernel can give without swapping others out, plus free swap, within the limits of the cgroup
cgroup     version 2 (memory.max, memory.swap.max) or 1 (memory.limit_in_bytes, memory.memsw.limit_in_bytes)
limit      of a cgroup: it holds for every process of the group and of the groups below it
headroom   a limit, less its use, plus what it gives back on demand
Law: an unknown amount is None, never a guess; an unknown limit does not lower the answer.
"""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fourfold.environment.cgroup import CGROUP_ROOT, PROC_CGROUP, cgroup_dirs

MEMINFO = Path("/proc/meminfo")
PROCESS_STATUS = Path("/proc/self/status")
UNLIMITED_BYTES = 2**60  # cgroup v1 says "no limit" with a number near 2**63
MEMSW_LIMIT = "memory.memsw.limit_in_bytes"
# By the file of a limit: the file of the use, and the entries of memory.stat that are given back on demand (cached
# pages of files, the kernel's own caches).
CGROUP_FILES = {
    "memory.max": ("memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    MEMSW_LIMIT: ("memory.memsw.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


class MemoryLimit(NamedTuple):
    """The limit of a group, and its headroom.

    Version 2 limits memory and swap separately; version 1 limits memory, and the sum of memory and swap. Memory beyond
    its limit is swapped out, so free swap adds to every limit that does not include it.
    """

    folder: Path
    limit_bytes: int
    headroom_bytes: int
    includes_swap: bool

    def swap_beyond(self, free_swap: int) -> int:
        """The bytes that can be swapped out when the limit is reached."""
        if self.includes_swap:
            return 0
        limit, use = _read_int(self.folder / "memory.swap.max"), _read_int(self.folder / "memory.swap.current")
        return free_swap if limit is None else min(free_swap, max(0, limit - (use or 0)))


def available_bytes() -> int | None:
    """Bytes that could be allocated on this host, swap included; None if the system does not say."""
    available, free_swap = _meminfo("MemAvailable"), _meminfo("SwapFree") or 0
    if available is None:
        return None
    headrooms = (limit.headroom_bytes + limit.swap_beyond(free_swap) for limit in _memory_limits())
    return min([available + free_swap, *headrooms])


def total_bytes() -> int | None:
    """The memory of this host, or what a cgroup or a limit of this process allows; None if the system does not say."""
    total = _meminfo("MemTotal")
    if total is None:
        return None
    limits = [limit.limit_bytes for limit in _memory_limits()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min([total, *limits, *([] if address_space == resource.RLIM_INFINITY else [address_space])])


def resident_bytes(entry: str = "VmRSS") -> int | None:
    """The bytes of this process in memory, or with `entry="VmHWM"` the most so far; None if the system does not say."""
    try:
        lines = PROCESS_STATUS.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:")), None)
    except (OSError, ValueError, IndexError):
        return None


def tightest_memory_limit() -> MemoryLimit | None:
    """The limit with the least headroom, which this process reaches first if it does not swap; None without limits."""
    return min(_memory_limits(), key=lambda limit: limit.headroom_bytes, default=None)


def _meminfo(name: str) -> int | None:
    """An entry in bytes, such as MemAvailable (since Linux 3.14)."""
    try:
        lines = MEMINFO.read_text().splitlines()
        values = {name: int(text.split()[0]) * 1024 for name, _, text in (line.partition(":") for line in lines)}
        return values.get(name)
    except (OSError, ValueError, IndexError):
        return None


def _memory_limits() -> Iterator[MemoryLimit]:
    """Every memory limit that holds for this process: of its own group and of those above it."""
    for folder in cgroup_dirs("memory", root=CGROUP_ROOT, proc_cgroup=PROC_CGROUP):
        for limit_file, (use_file, reclaimable) in CGROUP_FILES.items():
            limit, use = _read_int(folder / limit_file), _read_int(folder / use_file)
            if limit is not None and use is not None and limit < UNLIMITED_BYTES:
                headroom = max(0, limit - use + _reclaimable_bytes(folder, reclaimable))
                yield MemoryLimit(folder, limit, headroom, includes_swap=limit_file == MEMSW_LIMIT)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _reclaimable_bytes(folder: Path, names: tuple[str, ...]) -> int:
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            total += int(value) if name in names else 0
    return total
