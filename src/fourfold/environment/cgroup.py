"""Cgroups: where the limits of a container are written, and its CPU quota.

group      a folder of /sys/fs/cgroup; a limit on a group also holds for every group below it
version 2  cpu.max; one tree of groups
version 1  cpu.cfs_quota_us and cpu.cfs_period_us; one tree of groups per controller
Law: the smallest limit among this process's group and the groups above it counts.
"""

import contextlib
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


def cgroup_dirs(controller: str, *, root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> list[Path]:
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
    quotas = (_quota_in(folder) for folder in cgroup_dirs("cpu", root=root, proc_cgroup=proc_cgroup))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_in(folder: Path) -> float | None:
    for read in (_read_v2, _read_v1):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = read(folder)
            if quota > 0 and period > 0:
                return quota / period
    return None


def _read_v2(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _read_v1(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
