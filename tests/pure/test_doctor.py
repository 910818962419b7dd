"""Doctor: every warning and failure of every row, from made-up facts; and a probe of this machine."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main
from fourfold.doctor import checks
from fourfold.doctor.checks import (
    FAIL,
    GIB,
    MIB,
    OK,
    OLDEST_TORCH,
    WARN,
    GlooTiming,
    MachineFacts,
    check_machine,
    exit_code,
    format_findings,
    probe_machine,
)

ROOT = Path(__file__).parents[2]
HEALTHY = MachineFacts(
    python=(3, 12, 1),
    torch="2.13.0+cpu",
    cores=8,
    machine_cores=8,
    load_average=0.2,
    total_bytes=64 * GIB,
    available_bytes=50 * GIB,
    shared_bytes=GIB,
    shm_bytes=GIB,
    files_limit=4096,
    disk_free_bytes=100 * GIB,
    write_rate=500 * MIB,
    gloo=GlooTiming(bulk_seconds=0.003, value_seconds=0.0001),
    now=1.8e9,
)


def test_a_healthy_machine_has_nothing_to_fix() -> None:
    findings = check_machine(HEALTHY)
    assert {finding.mark for finding in findings} == {OK}
    assert not any(finding.attempt for finding in findings)
    assert exit_code(findings) == 0
    assert format_findings(findings).endswith("\n\nnothing to fix")


NO_GPU = {"has_gpu_driver": True, "cuda_build": "13.0"}
LAUNCHED = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
PLACED = {**LAUNCHED, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
BAD_VALUES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("python", FAIL, "3.11", {"python": (3, 10, 9)}),
    ("torch", FAIL, "pip install", {"torch_problem": "does not import: libcudart.so.13"}),
    ("torch", FAIL, "torch 2.11 to", {"torch": "2.4.1"}),
    ("torch", WARN, "torch 2.11 to", {"torch": "2.99.0a0+git123"}),
    ("gpus", WARN, "a CUDA build", {"has_gpu_driver": True}),
    ("gpus", WARN, "nvidia-smi", NO_GPU),
    ("gpus", WARN, "unset CUDA_VISIBLE_DEVICES", {**NO_GPU, "environ": {"CUDA_VISIBLE_DEVICES": ""}}),
    ("cores", WARN, "at least 1 core", {"quota_cores": 0.5}),
    ("cores", WARN, "ending", {"load_average": 9.0}),
    ("threads", FAIL, "unset OMP_NUM_THREADS", {"environ": {"OMP_NUM_THREADS": "all"}}),
    ("threads", WARN, "unset OMP_NUM_THREADS", {"environ": {"OMP_NUM_THREADS": "9"}}),
    ("threads", WARN, "unset OMP", {"environ": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}}),
    ("memory", WARN, "a smaller batch", {"available_bytes": GIB}),
    ("memory", WARN, "a smaller batch", {"limit_bytes": 4 * GIB, "limit_left_bytes": GIB}),
    ("shared memory", WARN, "slower", {"machine": "aarch64"}),
    ("shared memory", WARN, "memory limit", {"shared_problem": "[Errno 28] No space left on device"}),
    ("/dev/shm", WARN, "--shm-size", {"shm_bytes": 64 * MIB}),
    ("/dev/shm", WARN, "tmpfs", {"shm_bytes": None}),
    ("open files", WARN, "ulimit -n", {"files_limit": 256}),
    ("disk", FAIL, "written to", {"disk_problem": "cannot write here: read-only file system"}),
    ("disk", FAIL, "another folder", {"disk_free_bytes": 10 * MIB}),
    ("disk", WARN, "making room", {"disk_free_bytes": GIB}),
    ("disk", WARN, "local disk", {"write_rate": 3 * MIB}),
    ("2 processes", FAIL, "GLOO_SOCKET_IFNAME", {"gloo": GlooTiming(problem="gloo: no address")}),
    ("2 processes", WARN, "ending", {"gloo": GlooTiming(bulk_seconds=1.0, value_seconds=0.1)}),
    ("launcher", FAIL, "the launcher again", {"environ": {**PLACED, "OMPI_COMM_WORLD_RANK": "2"}}),
    ("launcher", FAIL, "WORLD_SIZE=N", {"environ": {"RANK": "1"}}),
    ("launcher", WARN, "unset PMI_RANK", {"environ": {**PLACED, "PMI_RANK": "1", "PMI_SIZE": "2"}}),
    ("variables", WARN, "unset FOURFOLD_HOST", {"environ": {"FOURFOLD_HOST": "a"}}),
    ("variables", WARN, "FOURFOLD_TRACEBACK", {"environ": {"FOURFOLD_TRACEBAK": "full"}}),
    ("clock", FAIL, "ntp", {"now": 0.0}),
    ("clock", WARN, "file server", {"skew_seconds": -90.0}),
]


@pytest.mark.parametrize(
    ("name", "mark", "attempt", "changes"), BAD_VALUES, ids=[f"{i[0]}-{i[1]}-{i[2]}" for i in BAD_VALUES]
)
def test_a_bad_value_marks_only_its_own_row_and_suggests_a_fix(
    name: str, mark: str, attempt: str, changes: dict[str, Any]
) -> None:
    findings = check_machine(dataclasses.replace(HEALTHY, **changes))
    bad = [finding for finding in findings if finding.mark != OK]
    assert [(finding.name, finding.mark) for finding in bad] == [(name, mark)]
    assert attempt in bad[0].attempt
    assert exit_code(findings) == int(mark == FAIL)
    assert f"try {bad[0].attempt}" in format_findings(findings)


def test_every_row_has_a_bad_value_in_these_tests() -> None:
    assert {finding.name for finding in check_machine(HEALTHY)} - {case[0] for case in BAD_VALUES} == set()


def test_a_container_limit_counts_only_if_it_is_lower() -> None:
    def memory(**changes: Any) -> str:
        return next(f.value for f in check_machine(dataclasses.replace(HEALTHY, **changes)) if f.name == "memory")

    assert memory(limit_bytes=8 * GIB, limit_left_bytes=6 * GIB) == "6.00 GiB free of 8.00 GiB (container limit)"
    assert memory(limit_bytes=999 * GIB, limit_left_bytes=1) == "50.0 GiB free of 64.0 GiB"


def test_the_oldest_supported_torch_is_the_one_in_pyproject() -> None:
    required = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    assert tuple(map(int, required.groups())) == OLDEST_TORCH


def test_a_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    facts = probe_machine(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert facts.write_rate > 0
    assert facts.disk_problem == ""
    assert facts.shared_bytes > 0
    assert 1 <= facts.cores <= facts.machine_cores


def test_a_folder_that_cannot_be_written_to_is_reported(tmp_path: Path) -> None:
    facts = probe_machine(Path("/proc/self"))
    assert facts.disk_problem.startswith("cannot write here")


def test_json_output_has_the_same_rows_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "measure_gloo", functools.cache(checks.measure_gloo))  # starts two processes

    def doctor(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        out, err = capfd.readouterr()
        assert err == ""
        assert isinstance(ended.value.code, int)
        return ended.value.code, out

    code, text = doctor()
    json_code, json_text = doctor("--json")
    rows = json.loads(json_text)
    marks = [line.split()[0] for line in text.split("\n\n")[0].splitlines()]
    assert code == int(FAIL in marks), text  # separately: a busy machine may fail one of two probes
    assert json_code == int(any(row["mark"] == FAIL for row in rows)), json_text
    names = [row["name"] for row in rows]
    assert names[:2] == ["python", "torch"]
    assert "2 processes" in names
    assert [line.split()[1] for line in text.split("\n\n")[0].splitlines()] == [name.split()[0] for name in names]
    assert all(set(row) == {"name", "mark", "value", "try"} for row in rows)
