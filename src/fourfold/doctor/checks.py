"""Checks: what the facts about this machine mean for training, and what to fix, as a table. One function per row.

finding  one row: ok, warn or fail, the value found, and what to try if it is not ok
Law: a check reads the facts and nothing else. `fail` means that training cannot start or goes wrong; `warn` means that
it is slower than need be, or surprises.

facts   what the probes have found: plain values, so that a test can make up any machine
limit   of a container: see `environment/host_limits.py`
test    a file of 32 MiB is written and removed, shared memory is reserved and released
Law: the probe leaves nothing behind, and what it cannot find out is None, never a guess.
child  a fork of this process, which has imported torch already: starting two new processes would take seconds
Law: when `measure_gloo` returns, neither child is left, whatever happened.
"""

import contextlib
import json
import os
import platform
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from fourfold.environment import host_limits, launchers
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.environment.world import num_cores
from fourfold.words.errors import FourfoldError, closest_match, os_error_text
from fourfold.words.terminal_text import align_columns, terminal_width
from fourfold.words.units import format_bytes

GIB, MIB = 2**30, 2**20

# ---- Machine probe: looks at this machine. It takes about two seconds, most of them to import torch -----------------

# ---- the facts -------------------------------------------------------------------------------------------------------


OLDEST_PYTHON = (3, 11)
EARLIEST_TIME = 1735689600.0  # 1 January 2025: a clock that shows an earlier time is wrong


@dataclass(frozen=True)
class GlooTiming:
    """Two processes of this host over gloo: the seconds to all-reduce 4 MiB and one value, or why it failed."""

    bulk_seconds: float = 0.0
    value_seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """What was found. An optional value is None if it could not be found out; a problem is "" if there is none.

    quota_cores    processors that a container grants
    limit_bytes    the memory limit of the container (cgroup); None if there is none
    shared_bytes   shared memory reserved in a test; 0 with `shared_problem`
    write_rate     bytes a second in the current folder, fsync included
    skew_seconds   difference between the time stamp of a new file and this machine's clock
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    system: str = "linux"
    machine: str = "x86_64"
    python: tuple[int, ...] = OLDEST_PYTHON
    torch: str = ""
    torch_problem: str = ""
    cuda_build: str | None = None
    gpus: Sequence[str] = ()
    has_gpu_driver: bool = False
    cores: int = 1
    machine_cores: int = 1
    quota_cores: float | None = None
    load_average: float = 0.0
    total_bytes: int = 0
    available_bytes: int = 0
    limit_bytes: int | None = None
    limit_left_bytes: int | None = None
    shared_bytes: int = 0
    shared_problem: str = ""
    shm_bytes: int | None = None
    files_limit: int | None = None
    disk_free_bytes: int = 0
    write_rate: float = 0.0
    disk_problem: str = ""
    gloo: GlooTiming | None = None
    now: float = EARLIEST_TIME
    skew_seconds: float = 0.0


# ---- the probe -------------------------------------------------------------------------------------------------------


SHM = Path("/dev/shm")
WRITE_BYTES = 32 * MIB
SHARED_BYTES = 256 * MIB
WRITE_SECONDS = 1.0  # a slow disk shows before all is written


def probe_machine(folder: Path = Path()) -> MachineFacts:
    """The facts, but for `gloo`. Starts no process."""
    memory = psutil.virtual_memory()
    limit = host_limits.tightest_memory_limit()
    left = memory.available if limit is None else min(memory.available, limit.headroom_bytes)
    shared_bytes, shared_problem = _probe_shared_memory(min(SHARED_BYTES, max(MIB, left // 8)))
    rate, skew, disk_problem = _probe_disk(folder)
    return MachineFacts(
        environ=dict(os.environ),
        system=sys.platform,
        machine=platform.machine(),
        python=tuple(sys.version_info[:3]),
        **_probe_torch(),
        has_gpu_driver=Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(),
        cores=num_cores(),
        machine_cores=os.cpu_count() or 1,
        quota_cores=host_limits.cpu_quota(),
        load_average=os.getloadavg()[0],
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=None if limit is None else limit.limit_bytes,
        limit_left_bytes=None if limit is None else limit.headroom_bytes,
        shared_bytes=shared_bytes,
        shared_problem=shared_problem,
        shm_bytes=shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        files_limit=_files_limit(),
        disk_free_bytes=shutil.disk_usage(folder).free,
        write_rate=rate,
        disk_problem=disk_problem,
        now=time.time(),
        skew_seconds=skew,
    )


def _probe_torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a missing CUDA library raises OSError, a numpy that does not fit any error
        lines = str(error).splitlines() or [type(error).__name__]
        return {"torch_problem": f"does not import: {lines[0]}"}
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "cuda_build": torch.version.cuda or torch.version.hip, "gpus": tuple(gpus)}


def _probe_shared_memory(num_bytes: int) -> tuple[int, str]:
    """The bytes of shared memory that could be reserved, and why none could."""
    try:
        from fourfold.torch_kit import memory
    except Exception:  # torch does not import, which has a row of its own
        return 0, "not tested without torch"
    try:
        memory.close_shared(memory.create_shared(num_bytes))
    except memory.MemoryUnavailable as error:
        return 0, error.problems[0].got
    return num_bytes, ""


def _files_limit() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _probe_disk(folder: Path) -> tuple[float, float, str]:
    """Bytes per second with fsync, the skew of a new file's time stamp, and why nothing could be written."""
    block = os.urandom(MIB)  # random bytes: a file system that compresses must not look fast
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin, written = time.perf_counter(), 0
            while written < WRITE_BYTES and time.perf_counter() - begin < WRITE_SECONDS:
                file.write(block)
                file.flush()
                written += MIB
            os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
            os.utime(file.fileno())  # the file server stamps it, if there is one
            return written / seconds, os.fstat(file.fileno()).st_mtime - time.time(), ""
    except OSError as error:
        return 0.0, 0.0, f"cannot write here: {os_error_text(error)}"


# ---- Gloo probe: how long an all-reduce takes between two processes of this host, over gloo as ranks use it ---------

TIMEOUT_SECONDS = 3.0
NUM_SCALARS, NUM_BULKS = 50, 5
BULK_ELEMENTS = 2**20  # float32: 4 MiB, a bucket of the default size


def measure_gloo() -> GlooTiming:
    """All-reduce between two forks. Call it before this process has used torch's threads."""
    with temporary_folder() as folder:
        read_fd, write_fd = os.pipe()
        children = [_fork_rank(rank, folder / "store", write_fd) for rank in range(2)]
        os.close(write_fd)
        try:
            return _read_result(read_fd)
        finally:
            os.close(read_fd)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _read_result(read_fd: int) -> GlooTiming:
    ready, _, _ = select.select([read_fd], [], [], TIMEOUT_SECONDS)
    if not ready:
        return GlooTiming(problem=f"no answer over gloo within {TIMEOUT_SECONDS:.0f} s")
    # The child writes its answer at once, short enough for a pipe's atomic write: all of it arrives, or nothing.
    line = os.read(read_fd, 4096).partition(b"\n")[0]
    return GlooTiming(**json.loads(line)) if line else GlooTiming(problem="the processes ended without an answer")


def _fork_rank(rank: int, store: Path, write_fd: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's own warnings
        timing = _time_all_reduce(rank, store)
        if rank == 0:
            os.write(write_fd, json.dumps(timing).encode() + b"\n")
            signal.pause()  # The other rank may still be in its last reduction.
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        os.write(write_fd, json.dumps({"problem": f"gloo: {text[:300]}"}).encode() + b"\n")
    finally:
        os._exit(0)  # without flushing or closing what the parent will flush and close


def _time_all_reduce(rank: int, store: Path) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # a fork does not have the threads of its parent
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    value, bulk = torch.zeros(1), torch.zeros(BULK_ELEMENTS)

    def seconds(tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        return time.perf_counter() - begin

    dist.all_reduce(value)
    values = [seconds(value) for _ in range(NUM_SCALARS)]
    bulks = [seconds(bulk) for _ in range(NUM_BULKS)]
    return {"bulk_seconds": statistics.median(bulks), "value_seconds": statistics.median(values)}


# ---- the rows --------------------------------------------------------------------------------------------------------


OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One row. `attempt` is what to try if the mark is not ok."""

    name: str
    mark: str
    value: str
    attempt: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if any row fails, else 0."""
    return int(any(finding.mark == FAIL for finding in findings))


def format_findings(findings: Sequence[Finding]) -> str:
    """Aligned rows, and a last line that counts those that are not ok."""
    rows = [(f.mark, f.name, f.value, f"try {f.attempt}" if f.attempt else "") for f in findings]
    lines = align_columns(rows, "<<<<", gap="   ")
    if max(map(len, lines)) > terminal_width():
        stacked = [each for *row, attempt in rows for each in ((*row,), ("", "", attempt)) if each[-1]]
        lines = align_columns(stacked, "<<<", gap="   ")
    marks = [finding.mark for finding in findings]
    bad = [f"{marks.count(mark)} {word}" for mark, word in ((FAIL, "failing"), (WARN, "to look at")) if mark in marks]
    return "\n".join([*lines, "", ", ".join(bad) or "nothing to fix"])


# ---- the checks ------------------------------------------------------------------------------------------------------


OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 11), (2, 13)
LOW_MEMORY_BYTES, LOW_DISK_BYTES, FULL_DISK_BYTES = 2 * GIB, 5 * GIB, 256 * MIB
LOW_SHM_BYTES = 256 * MIB  # Docker's default is 64 MiB
SLOW_DISK_BYTES_PER_SECOND = 30 * MIB
MIN_OPEN_FILES = 1024
SKEW_SECONDS = 2.0
SLOW_SCALAR_SECONDS = 2e-3  # to all-reduce one value; 0.1 ms on an idle machine
FOURFOLD_VARIABLES = ("FOURFOLD_HOST", "FOURFOLD_SERVICE", "FOURFOLD_TRACEBACK", "FOURFOLD_WORLD_SIZE")


def check_machine(facts: MachineFacts) -> list[Finding]:
    """All rows, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(facts)]


# ---- the rows


def _python(facts: MachineFacts) -> list[Finding]:
    text = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST_PYTHON:
        return [Finding("python", FAIL, text, f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")]
    return [Finding("python", OK, text)]


def _torch(facts: MachineFacts) -> list[Finding]:
    if facts.torch_problem:
        return [Finding("torch", FAIL, facts.torch_problem, "pip install -c constraints.txt torch")]
    version = _parse_version(facts.torch)
    tested = f"{_format_version(OLDEST_TORCH)} to {_format_version(NEWEST_TESTED_TORCH)}"
    if version < OLDEST_TORCH:
        return [Finding("torch", FAIL, facts.torch, f"torch {tested}")]
    if version > NEWEST_TESTED_TORCH:
        return [Finding("torch", WARN, f"{facts.torch}, newer than the tested versions", f"torch {tested}")]
    return [Finding("torch", OK, facts.torch)]


def _gpus(facts: MachineFacts) -> list[Finding]:
    if facts.torch_problem:
        return []
    if facts.gpus:
        names = ", ".join(f"{facts.gpus.count(name)} × {name}" for name in dict.fromkeys(facts.gpus))
        return [Finding("gpus", OK, f"{names} (CUDA {facts.cuda_build})")]
    if facts.has_gpu_driver and facts.cuda_build is None:
        return [Finding("gpus", WARN, "a driver, but this torch is built for CPUs only", "a CUDA build of torch")]
    if facts.has_gpu_driver:
        is_hidden = "CUDA_VISIBLE_DEVICES" in facts.environ
        attempt = "unset CUDA_VISIBLE_DEVICES" if is_hidden else "nvidia-smi; the driver must be as new as torch's CUDA"
        return [Finding("gpus", WARN, f"a driver, but torch {facts.cuda_build} sees none", attempt)]
    return [Finding("gpus", OK, "none: ranks use the CPU")]


def _cores(facts: MachineFacts) -> list[Finding]:
    value = f"{facts.cores} of {facts.machine_cores}"
    if facts.quota_cores is not None and facts.quota_cores < facts.machine_cores:
        value += f" (a quota of {facts.quota_cores:g})"
    if facts.quota_cores is not None and facts.quota_cores < 1:
        return [Finding("cores", WARN, value, "a container with at least 1 core")]
    if facts.load_average > facts.cores + 0.5:
        return [Finding("cores", WARN, f"{value}, load {facts.load_average:.1f}", "ending other programs")]
    return [Finding("cores", OK, f"{value}, load {facts.load_average:.1f}")]


def _threads(facts: MachineFacts) -> list[Finding]:
    given = {name: facts.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in facts.environ}
    if not given:
        return [Finding("threads", OK, "not set: the ranks divide the cores among themselves")]
    value = ", ".join(f"{name}={text}" for name, text in given.items())
    unset = f"unset {' '.join(given)}"
    # OpenMP allows a list: a number per level of nesting.
    numbers = [text.split(",")[0] for text in given.values()]
    if not all(number.isdecimal() and int(number) for number in numbers):
        return [Finding("threads", FAIL, value, unset)]
    if len(set(numbers)) > 1:
        return [Finding("threads", WARN, f"{value}: they contradict each other", unset)]
    if max(map(int, numbers)) > facts.cores:
        return [Finding("threads", WARN, f"{value}, more than the {facts.cores} cores", unset)]
    return [Finding("threads", OK, value)]


def _memory(facts: MachineFacts) -> list[Finding]:
    total, left = facts.total_bytes, facts.available_bytes
    is_limited = facts.limit_bytes is not None and facts.limit_bytes < total
    if is_limited:
        total, left = facts.limit_bytes or 0, min(left, facts.limit_left_bytes or 0)
    value = f"{format_bytes(left)} free of {format_bytes(total)}{' (container limit)' if is_limited else ''}"
    if left < LOW_MEMORY_BYTES:
        return [Finding("memory", WARN, value, "a smaller batch, fewer ranks, or ending other programs")]
    return [Finding("memory", OK, value)]


def _shared_memory(facts: MachineFacts) -> list[Finding]:
    remedy = "nothing: the ranks of this host use gloo, which is slower"
    if facts.system != "linux" or facts.machine != "x86_64":
        got = f"needs Linux on x86-64, this is {facts.system} on {facts.machine}"
        return [Finding("shared memory", WARN, got, remedy)]
    if facts.shared_problem:
        return [
            Finding("shared memory", WARN, facts.shared_problem, "a larger memory limit; until then ranks use gloo")
        ]
    return [Finding("shared memory", OK, f"{format_bytes(facts.shared_bytes)} reserved and released")]


def _shm(facts: MachineFacts) -> list[Finding]:
    if facts.shm_bytes is None:
        return [Finding("/dev/shm", WARN, "missing", "mounting a tmpfs: data loaders with workers need it")]
    if facts.shm_bytes < LOW_SHM_BYTES:
        attempt = "docker run --shm-size=1g: data loaders with workers need it"
        return [Finding("/dev/shm", WARN, f"{format_bytes(facts.shm_bytes)} free", attempt)]
    return [Finding("/dev/shm", OK, f"{format_bytes(facts.shm_bytes)} free")]


def _open_files(facts: MachineFacts) -> list[Finding]:
    if facts.files_limit is None:
        return []
    if facts.files_limit < MIN_OPEN_FILES:
        return [Finding("open files", WARN, f"at most {facts.files_limit}", "ulimit -n 4096")]
    return [Finding("open files", OK, f"at most {facts.files_limit}")]


def _disk(facts: MachineFacts) -> list[Finding]:
    if facts.disk_problem:
        return [Finding("disk", FAIL, facts.disk_problem, "a folder that can be written to")]
    value = f"{format_bytes(facts.disk_free_bytes)} free here, writes {facts.write_rate / MIB:.0f} MiB/s"
    if facts.disk_free_bytes < FULL_DISK_BYTES:
        return [Finding("disk", FAIL, value, "another folder: a run writes its log and its checkpoints here")]
    if facts.disk_free_bytes < LOW_DISK_BYTES:
        return [Finding("disk", WARN, value, "making room: a run writes its checkpoints here")]
    if facts.write_rate < SLOW_DISK_BYTES_PER_SECOND:
        return [Finding("disk", WARN, value, "a local disk instead of a network folder")]
    return [Finding("disk", OK, value)]


def _gloo(facts: MachineFacts) -> list[Finding]:
    if facts.gloo is None:
        return []
    if facts.gloo.problem:
        attempt = "GLOO_SOCKET_IFNAME=lo, or a host name that resolves (/etc/hosts)"
        return [Finding("2 processes", FAIL, facts.gloo.problem, attempt)]
    bulk, value = 1e3 * facts.gloo.bulk_seconds, 1e3 * facts.gloo.value_seconds
    text = f"all-reduce of 4 MiB in {bulk:.1f} ms, of 1 value in {value:.2f} ms"
    if facts.gloo.value_seconds > SLOW_SCALAR_SECONDS:
        return [Finding("2 processes", WARN, text, "ending other programs")]
    return [Finding("2 processes", OK, f"{text} (gloo)")]


def _launcher(facts: MachineFacts) -> list[Finding]:
    try:
        detected = launchers.detected_launchers(facts.environ)
        rank_info = launchers.detect(facts.environ)
    except FourfoldError as error:
        return [
            Finding("launcher", FAIL, f"{p.got}, need {p.need}" if p.need else p.got, p.attempt or "the launcher again")
            for p in error.problems
        ]
    if rank_info is None:
        return [Finding("launcher", OK, "none: fourfold starts the processes itself")]
    value = f"{rank_info.launcher.name}: rank {rank_info.rank} of {rank_info.size}"
    others = [other for other in detected[1:] if _rank_text(other, facts.environ) not in ("", str(rank_info.rank))]
    if others:
        names = " ".join(name for other in others for name in other.rank_vars if name in facts.environ)
        value += f", but {', '.join(other.name for other in others)} contradicts it"
        return [Finding("launcher", WARN, value, f"unset {names}, unless one launcher runs inside the other")]
    return [Finding("launcher", OK, value)]


def _rank_text(launcher: launchers.Launcher, environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in launcher.rank_vars if environ.get(name)), "")


def _variables(facts: MachineFacts) -> list[Finding]:
    findings = []
    for name in sorted(facts.environ):
        if not name.startswith("FOURFOLD_"):
            continue
        value = f"{name}={facts.environ[name]}"
        if name not in FOURFOLD_VARIABLES:
            close = closest_match(name, FOURFOLD_VARIABLES)
            findings.append(Finding("variables", WARN, f"{value} is not known", close or f"unset {name}"))
        elif name == "FOURFOLD_HOST":
            findings.append(Finding("variables", WARN, f"{value} decides which ranks share memory", f"unset {name}"))
        else:
            findings.append(Finding("variables", OK, value))
    return findings


def _clock(facts: MachineFacts) -> list[Finding]:
    if facts.now < EARLIEST_TIME:
        return [Finding("clock", FAIL, "before 2025", "setting the clock (ntp)")]
    if abs(facts.skew_seconds) > SKEW_SECONDS:
        value = f"new files are stamped {facts.skew_seconds:+.0f} s off this machine's clock"
        return [Finding("clock", WARN, value, "ntp on this machine and the file server")]
    return [Finding("clock", OK, "agrees with the time stamps of new files")]


CHECKS: tuple[Callable[[MachineFacts], list[Finding]], ...] = (
    _python,
    _torch,
    _gpus,
    _cores,
    _threads,
    _memory,
    _shared_memory,
    _shm,
    _open_files,
    _disk,
    _gloo,
    _launcher,
    _variables,
    _clock,
)


def _parse_version(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(char for char in part if char.isdecimal()) or 0) for part in parts)


def _format_version(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
