"""Machine probe: looks at this machine. It takes about two seconds, most of them to import torch.

facts   what the probes have found: plain values, so that a test can make up any machine
limit   of a container: see `environment/host_limits.py`
test    a file of 32 MiB is written and removed, shared memory is reserved and released
Law: the probe leaves nothing behind, and what it cannot find out is None, never a guess.
"""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fourfold.environment import host_limits
from fourfold.environment.world import num_cores
from fourfold.words.errors import os_error_text

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


MIB = 2**20
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
