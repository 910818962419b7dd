"""The CPU quota and the memory limit of a container: one answer, for a run and for the doctor."""

from pathlib import Path
from unittest import mock

import pytest

from fourfold.doctor import checks
from fourfold.environment import host_limits, world


def tree(folder: Path, files: dict[str, str], own_cgroup: str) -> dict[str, Path]:
    """A file system of cgroups, and what the kernel says of this process."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own_cgroup").write_text(own_cgroup)
    return {"root": folder / "cgroup", "proc_cgroup": folder / "own_cgroup"}


V1 = "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n"
TREES = {
    "no files": ({}, "0::/\n", None),
    "no limit": ({"cpu.max": "max 100000\n"}, "0::/\n", None),
    "version 2, in a container": ({"cpu.max": "250000 100000\n"}, "0::/\n", 2.5),
    "version 2, its own group": ({"job/step/cpu.max": "150000 100000\n"}, "0::/job/step\n", 1.5),
    "version 2, a parent group": (
        {"job/cpu.max": "300000 100000\n", "job/step/cpu.max": "max 100000\n"}, "0::/job/step\n", 3.0,
    ),
    "version 2, the smallest of both": (
        {"job/cpu.max": "300000 100000\n", "job/step/cpu.max": "800000 100000\n"}, "0::/job/step\n", 3.0,
    ),
    "version 2, another group's": ({"other/cpu.max": "100000 100000\n"}, "0::/job\n", None),
    "version 1": ({"cpu/docker/a/cpu.cfs_quota_us": "50000\n", "cpu/docker/a/cpu.cfs_period_us": "100000\n"}, V1, 0.5),
    "version 1, in a container": ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, V1, 4.0),
    "version 1, no limit": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, V1, None),
    "damaged": ({"cpu.max": "a lot\n"}, "0::/\n", None),
    "a period of 0": ({"cpu.max": "100000 0\n"}, "0::/\n", None),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_quota_is_the_smallest_of_a_cgroup_and_its_ancestors(name, tmp_path):
    files, own_cgroup, quota = TREES[name]
    assert host_limits.cpu_quota(**tree(tmp_path, files, own_cgroup)) == quota


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (1.5, 1), (3.0, 3), (100.0, 8)])
def test_a_run_and_the_doctor_see_the_same_quota(quota, cores):
    with (
        mock.patch.object(host_limits, "cpu_quota", return_value=quota),
        mock.patch("os.sched_getaffinity", return_value=set(range(8))),
    ):
        found = checks.probe_machine()
        assert (world.num_cores(), found.cores, found.quota_cores) == (cores, cores, quota)


LARGE_V1 = str(2**63 - 4096)  # no limit
MEMORY_TREES = {
    "no limit": ({"memory.max": "max\n", "memory.current": "5\n"}, "0::/\n", (None, None)),
    "the own group": (
        {"job/memory.max": "9000\n", "job/memory.current": "5000\n", "job/memory.stat": "active_file 70\n"},
        "0::/job\n", (9000, 4070),
    ),
    "a group above, which has less left": (
        {"memory.max": "99000\n", "memory.current": "98000\n", "job/memory.max": "9000\n", "job/memory.current": "1\n"},
        "0::/job\n", (99000, 1000),
    ),
    "over the limit": ({"memory.max": "9000\n", "memory.current": "9001\n"}, "0::/\n", (9000, 0)),
    "version 1, no limit at all": (
        {"memory/memory.limit_in_bytes": LARGE_V1, "memory/memory.usage_in_bytes": "5000"}, V1, (None, None),
    ),
    "version 1, a limit": (
        {"memory/docker/a/memory.limit_in_bytes": "9000", "memory/docker/a/memory.usage_in_bytes": "5000",
         "memory/memory.limit_in_bytes": LARGE_V1, "memory/memory.usage_in_bytes": "5000"},
        V1, (9000, 4000),
    ),
    "version 1, with swap": (
        {"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "5000",
         "memory/memory.memsw.limit_in_bytes": "9500", "memory/memory.memsw.usage_in_bytes": "6500"},
        V1, (9500, 3000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY_TREES)
def test_a_run_and_the_doctor_see_the_same_memory_limit(name, tmp_path, monkeypatch):
    files, own, expected = MEMORY_TREES[name]
    paths = tree(tmp_path, files, own)
    (tmp_path / "meminfo").write_text("MemAvailable: 1000 kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(host_limits, "CGROUP_ROOT", paths["root"])
    monkeypatch.setattr(host_limits, "PROC_CGROUP", paths["proc_cgroup"])
    monkeypatch.setattr(host_limits, "MEMINFO", tmp_path / "meminfo")
    found = checks.probe_machine()
    assert (found.limit_bytes, found.limit_left_bytes) == expected
    has_limit = found.limit_left_bytes is not None
    assert host_limits.available_bytes() == (found.limit_left_bytes if has_limit else 1000 * 1024)
    # The probe reserves little of what is left.
    assert found.shared_problem == ""
    assert found.shared_bytes == checks.MIB if has_limit else found.shared_bytes <= checks.SHARED_BYTES
