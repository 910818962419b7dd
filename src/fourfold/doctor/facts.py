"""Facts: what the probes have found on this machine.

Law: plain values, so that a test can make up any machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
