"""Host limits: how many bytes this process could still allocate, and the CPU quota of its container.

available  what the kernel can give without swapping others out, plus free swap, within the limits of the cgroup
group      a folder of /sys/fs/cgroup; a limit on a group holds for every process of it and of the groups below it
cgroup     version 2 (cpu.max, memory.max, memory.swap.max), one tree of groups; or version 1 (cpu.cfs_quota_us and
           cpu.cfs_period_us, memory.limit_in_bytes, memory.memsw.limit_in_bytes), one tree of groups per controller
headroom   a limit, less its use, plus what it gives back on demand
Law: the smallest limit among this process's group and the groups above it counts. An unknown amount is None, never a
guess; an unknown limit does not lower the answer.
"""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# ---- cgroups, and their CPU quota ------------------------------------------------------------------------------------


CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


def _cgroup_dirs(controller: str, *, root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> list[Path]:
    """The groups whose limits hold for this process: its own first, then those above it.

    In a container the path in /proc may be the host's, and the container sees only the root: the root is always listed.
    """
    dirs: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        for line in proc_cgroup.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names or controller in names.split(","):
                top = root / controller if names else root
                group = top / path.strip("/")
                dirs += [group, *(above for above in group.parents if above.is_relative_to(top))]
    return list(dict.fromkeys([*dirs, root, root / controller]))


def cpu_quota(*, root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> float | None:
    """How many processors' time this process may use; None if there is no limit."""
    quotas = (_quota_in(folder) for folder in _cgroup_dirs("cpu", root=root, proc_cgroup=proc_cgroup))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_in(folder: Path) -> float | None:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0 and period > 0:
                return quota / period
    return None


# ---- memory ----------------------------------------------------------------------------------------------------------


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
    available, free_swap = _bytes_in(MEMINFO, "MemAvailable"), _bytes_in(MEMINFO, "SwapFree") or 0
    if available is None:
        return None
    headrooms = (limit.headroom_bytes + limit.swap_beyond(free_swap) for limit in _memory_limits())
    return min([available + free_swap, *headrooms])


def total_bytes() -> int | None:
    """The memory of this host, or what a cgroup or a limit of this process allows; None if the system does not say."""
    total = _bytes_in(MEMINFO, "MemTotal")
    if total is None:
        return None
    limits = [limit.limit_bytes for limit in _memory_limits()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min([total, *limits, *([] if address_space == resource.RLIM_INFINITY else [address_space])])


def resident_bytes(entry: str = "VmRSS") -> int | None:
    """The bytes of this process in memory, or with `entry="VmHWM"` the most so far; None if the system does not say."""
    return _bytes_in(PROCESS_STATUS, entry)


def tightest_memory_limit() -> MemoryLimit | None:
    """The limit with the least headroom, which this process reaches first if it does not swap; None without limits."""
    return min(_memory_limits(), key=lambda limit: limit.headroom_bytes, default=None)


def _bytes_in(path: Path, name: str) -> int | None:
    """An entry of a file of the kernel's, such as MemAvailable (since Linux 3.14)."""
    try:
        lines = path.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _memory_limits() -> Iterator[MemoryLimit]:
    """Every memory limit that holds for this process: of its own group and of those above it."""
    for folder in _cgroup_dirs("memory", root=CGROUP_ROOT, proc_cgroup=PROC_CGROUP):
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
