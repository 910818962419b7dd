"""Checks: what the facts about this machine mean for training, and what to fix, as a table. One function per row.

finding  one row: ok, warn or fail, the value found, and what to try if it is not ok
Law: a check reads the facts and nothing else. `fail` means that training cannot start or goes wrong; `warn` means that
it is slower than need be, or surprises.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fourfold.doctor.machine_probe import EARLIEST_TIME, OLDEST_PYTHON, MachineFacts
from fourfold.environment import launchers
from fourfold.words.errors import FourfoldError, closest_match
from fourfold.words.terminal_text import terminal_width
from fourfold.words.text_table import align_columns
from fourfold.words.units import format_bytes

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


GIB, MIB = 2**30, 2**20

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
