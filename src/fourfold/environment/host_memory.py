"""Host memory: how many bytes this process's host could still give.

available  what the kernel would give without pushing others out, and free swap; within the limits of this cgroup
Law: what cannot be found out is None, never a guess; a limit that is not known does not lower the answer.

cgroup  version 2 (memory.max, memory.swap.max) or 1 (memory.limit_in_bytes, memory.memsw.limit_in_bytes)
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
PROC_CGROUP = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 2**60  # cgroup v1 says "no limit" with a number near 2**63
MEMSW_LIMIT = "memory.memsw.limit_in_bytes"
# limit, use, and what is given back on demand: the cached pages of files, and of the kernel's own objects
CGROUP_FILES = {
    "memory.max": ("memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    MEMSW_LIMIT: ("memory.memsw.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def available_bytes() -> int | None:
    """Bytes that could be allocated on this host, swap included; None where the system does not say."""
    found = _meminfo()
    if found is None:
        return None
    return min([sum(found), *_cgroup_headrooms(swap_bytes=found[1])])


def _meminfo() -> tuple[int, int] | None:
    """MemAvailable (Linux 3.14) and SwapFree."""
    try:
        lines = MEMINFO.read_text().splitlines()
        values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return values["MemAvailable"], values.get("SwapFree", 0)
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _cgroup_headrooms(*, swap_bytes: int) -> Iterator[int]:
    """What is left of the memory limit of this process's cgroup, and of each that it is in; `swap`: free on this host.

    Version 2 limits memory and swap apart; version 1 memory, and the sum of both. What does not fit is swapped out.
    """
    for folder in _cgroup_dirs():
        for most, (used, cached) in CGROUP_FILES.items():
            limit, use = _read_int(folder / most), _read_int(folder / used)
            if limit is not None and use is not None and limit < UNLIMITED_BYTES:
                left = max(0, limit - use + _reclaimable_bytes(folder, cached))
                yield left if most == MEMSW_LIMIT else left + min(swap_bytes, _swap_headroom(folder, swap_bytes))


def _swap_headroom(folder: Path, swap: int) -> int:
    limit, use = _read_int(folder / "memory.swap.max"), _read_int(folder / "memory.swap.current")
    return swap if limit is None else max(0, limit - (use or 0))


def _cgroup_dirs() -> Iterator[Path]:
    with contextlib.suppress(OSError, ValueError):
        for line in PROC_CGROUP.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names or "memory" in names.split(","):
                root = CGROUP / "memory" if names else CGROUP
                own = root / path.strip("/")
                yield own
                # A limit of a folder above holds too. In a container the path may be one of the host's: none is there.
                yield from (folder for folder in own.parents if folder.is_relative_to(root))
    yield CGROUP
    yield CGROUP / "memory"


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
