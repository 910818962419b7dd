"""Host memory: how many bytes this process's host could still give.

available  what the kernel would give without pushing others out, and free swap; within the limits of this cgroup
Law: what cannot be found out is None, never a guess; a limit that is not known does not lower the answer.

cgroup  version 2 (memory.max) or 1 (memory.limit_in_bytes), this process's own first
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
UNLIMITED = 2**60  # cgroup v1 says "no limit" with a number near 2**63
FILES = {  # limit, use, and the cached file pages that are given back on demand
    "memory.max": ("memory.current", ("inactive_file", "active_file")),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def available_bytes() -> int | None:
    """Bytes that could be allocated on this host, swap included; None where the system does not say."""
    found = _meminfo()
    if found is None:
        return None
    return min([found, *_left_in_cgroups()])


def _meminfo() -> int | None:
    """MemAvailable (Linux 3.14) and SwapFree."""
    try:
        lines = MEMINFO.read_text().splitlines()
        values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return values["MemAvailable"] + values.get("SwapFree", 0)
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _left_in_cgroups() -> Iterator[int]:
    """What is left of the memory limit of this process's cgroup, and of each that it is in."""
    for folder in _cgroups():
        for most, (used, cached) in FILES.items():
            limit, use = _number(folder / most), _number(folder / used)
            if limit is not None and use is not None and limit < UNLIMITED:
                yield max(0, limit - use + _cached(folder, cached))


def _cgroups() -> Iterator[Path]:
    with contextlib.suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names or "memory" in names.split(","):
                root = CGROUP / "memory" if names else CGROUP
                own = root / path.strip("/")
                yield own
                # A limit of a folder above holds too. In a container the path may be one of the host's: none is there.
                yield from (folder for folder in own.parents if folder.is_relative_to(root))
    yield CGROUP
    yield CGROUP / "memory"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _cached(folder: Path, names: tuple[str, ...]) -> int:
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            total += int(value) if name in names else 0
    return total
