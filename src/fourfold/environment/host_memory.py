"""Host memory: how many bytes this process could still allocate.

available  what the kernel can give without swapping others out, plus free swap, within the limits of the cgroup
cgroup     version 2 (memory.max, memory.swap.max) or 1 (memory.limit_in_bytes, memory.memsw.limit_in_bytes)
headroom   a limit of a cgroup, less its use, plus what it gives back on demand
Law: an unknown amount is None, never a guess; an unknown limit does not lower the answer.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fourfold.environment.cgroup import CGROUP_ROOT, PROC_CGROUP, cgroup_dirs

MEMINFO = Path("/proc/meminfo")
UNLIMITED_BYTES = 2**60  # cgroup v1 says "no limit" with a number near 2**63
MEMSW_LIMIT = "memory.memsw.limit_in_bytes"
# By the file of a limit: the file of the use, and the entries of memory.stat that are given back on demand (cached
# pages of files, the kernel's own caches).
CGROUP_FILES = {
    "memory.max": ("memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    MEMSW_LIMIT: ("memory.memsw.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def available_bytes() -> int | None:
    """Bytes that could be allocated on this host, swap included; None if the system does not say."""
    meminfo = _meminfo()
    if meminfo is None:
        return None
    available, free_swap = meminfo
    return min([available + free_swap, *_cgroup_headrooms(free_swap=free_swap)])


def _meminfo() -> tuple[int, int] | None:
    """MemAvailable (since Linux 3.14) and SwapFree, in bytes."""
    try:
        lines = MEMINFO.read_text().splitlines()
        values = {name: int(text.split()[0]) * 1024 for name, _, text in (line.partition(":") for line in lines)}
        return values["MemAvailable"], values.get("SwapFree", 0)
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _cgroup_headrooms(*, free_swap: int) -> Iterator[int]:
    """The headroom of every memory limit that holds for this process.

    Version 2 limits memory and swap separately; version 1 limits memory, and the sum of memory and swap. Memory beyond
    its limit is swapped out, so free swap adds to every limit that does not include it.
    """
    for folder in cgroup_dirs("memory", root=CGROUP_ROOT, proc_cgroup=PROC_CGROUP):
        for limit_file, (use_file, reclaimable) in CGROUP_FILES.items():
            limit, use = _read_int(folder / limit_file), _read_int(folder / use_file)
            if limit is not None and use is not None and limit < UNLIMITED_BYTES:
                headroom = max(0, limit - use + _reclaimable_bytes(folder, reclaimable))
                swap = 0 if limit_file == MEMSW_LIMIT else min(free_swap, _swap_headroom(folder, free_swap))
                yield headroom + swap


def _swap_headroom(folder: Path, free_swap: int) -> int:
    limit, use = _read_int(folder / "memory.swap.max"), _read_int(folder / "memory.swap.current")
    return free_swap if limit is None else max(0, limit - (use or 0))


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
