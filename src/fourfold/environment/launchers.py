"""Launchers: the rank and size that a launcher gives a process in its environment variables.

launcher    a program that starts the processes of a job: torchrun, mpirun, srun, Kubernetes
rank info   rank, size, local rank and local size of a process, and the launcher that set them
Slurm step  the processes that one `srun` starts. An `salloc` shell and a batch script also have Slurm's variables, but
            are not ranks of a step
node list   "gpu[01-03,07],login": host names, with ranges in brackets, read without Slurm
task counts "2(x3),1": how many tasks each node has, in the order of the node list
Law: the first launcher of the table whose rank variable is set started this process (torchrun runs inside srun and
mpirun inside salloc, never the other way round). Incomplete variables are a LaunchError.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fourfold.words.errors import LaunchError, Problem

# ---- lists of Slurm --------------------------------------------------------------------------------------------------


_RANGE = r"\d++(?:-\d++)?+"
_ENTRY = re.compile(rf"(?:[^\[\],\s]++|\[{_RANGE}(?:,{_RANGE})*+\])++")
_NODELIST = re.compile(rf"{_ENTRY.pattern}(?:,{_ENTRY.pattern})*+")
_BRACKET = re.compile(r"\[(\d++)-?+(\d*+)[^\[\]]*+\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(text: str) -> str:
    """The first host name of a node list: n08 of "n[08-10],m1". Raises ValueError."""
    entry = _ENTRY.match(text)
    if entry is None or not _NODELIST.fullmatch(text):
        raise ValueError(f"a node list {text!r}")
    if any(stop and int(stop) < int(start) for start, stop in _BRACKET.findall(entry[0])):
        raise ValueError(f"a node list {text!r}")
    return _BRACKET.sub(r"\1", entry[0])


def parse_task_counts(text: str) -> list[int]:
    """The number of tasks of each node: "2(x3),1" gives 2, 2, 2, 1. Raises ValueError."""
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"counts {text!r}")
    repeated = (itertools.repeat(int(match[1]), int(match[2] or 1)) for match in matches if match)
    return list(itertools.chain.from_iterable(repeated))


# ---- launchers -------------------------------------------------------------------------------------------------------


# Step ids from here on do not have ranks: the batch script, the interactive shell of salloc, the external step.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
Environ = Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher. Where a value has several names, the first that is set counts.

    job_vars  together they distinguish this job from others on the same host
    hint      how a user passes a variable to every process, for error messages
    """

    name: str
    rank_vars: tuple[str, ...]
    size_vars: tuple[str, ...]
    local_rank_vars: tuple[str, ...] = ()
    local_size_vars: tuple[str, ...] = ()
    job_vars: tuple[str, ...] = ()
    hint: str = "{} …"


TORCHRUN = Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
OPEN_MPI = Launcher(
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job_vars=("PMIX_NAMESPACE",),
    hint="mpirun -x {} …",
)
MPICH = Launcher(
    "MPICH, Intel MPI or PALS",
    ("PMI_RANK", "PALS_RANKID"),
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    job_vars=("PALS_APID",),
    hint="mpiexec -genv {} …",
)
SLURM = Launcher(
    "Slurm",
    ("SLURM_PROCID",),
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    ("SLURM_LOCALID",),
    job_vars=("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    hint="{} srun …",
)
PMIX = Launcher(
    "PMIx",
    ("PMIX_RANK",),
    ("FOURFOLD_WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE",),
    job_vars=("PMIX_NAMESPACE",),
)
KUBERNETES = Launcher(
    "Kubernetes",
    ("JOB_COMPLETION_INDEX",),
    ("FOURFOLD_WORLD_SIZE", "JOB_COMPLETIONS"),
    hint="env {} in the pod's template",
)
LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SLURM, PMIX, KUBERNETES)


@dataclass(frozen=True)
class RankInfo:
    """The ranks and sizes of one process, and the launcher that set them."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int


def detect(environ: Environ) -> RankInfo | None:
    """The rank info of this process; None if no launcher started it. Raises LaunchError."""
    launcher = next(iter(detected_launchers(environ)), None)
    if launcher is None:
        return None
    info = _read_rank_info(launcher, environ)
    if launcher in (SLURM, KUBERNETES) and info.size == 1:
        return None  # A single task or pod stands for a whole machine: our own launcher may start processes in it.
    return info


def detected_launchers(environ: Environ) -> list[Launcher]:
    """The launchers whose rank variable is set; the first one counts."""
    detected = [launcher for launcher in LAUNCHERS if _first_set(environ, launcher.rank_vars)]
    if SLURM in detected and not is_slurm_step(environ):
        detected.remove(SLURM)
    # `srun --mpi=pmi2` sets PMI_RANK too, and Slurm says more. If their ranks differ, srun started an mpiexec.
    if detected[:1] == [MPICH] and SLURM in detected and _agree(MPICH, SLURM, environ):
        detected.remove(MPICH)
    return detected


def is_slurm_step(environ: Environ) -> bool:
    """Whether an `srun` started this process."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def _agree(one: Launcher, other: Launcher, environ: Environ) -> bool:
    return all(
        _first_value(environ, ours) == _first_value(environ, theirs)
        for ours, theirs in ((one.rank_vars, other.rank_vars), (one.size_vars, other.size_vars))
    )


def _first_set(environ: Environ, names: Sequence[str]) -> str:
    """The first of these variables that is set; "" if none is."""
    return next((name for name in names if environ.get(name)), "")


def _first_value(environ: Environ, names: Sequence[str]) -> str:
    return environ.get(_first_set(environ, names), "")


def _read_rank_info(launcher: Launcher, environ: Environ) -> RankInfo:
    problems: list[Problem] = []
    rank = _read_int(environ, launcher.rank_vars, problems)
    size = _read_int(environ, launcher.size_vars, problems)
    if size is None and not problems:
        problems.append(_missing_size_problem(launcher, environ))
    if rank is None or size is None or problems:
        raise LaunchError(problems, where=_error_location(launcher))
    local_rank, local_size = _local_rank_and_size(launcher, environ, problems, rank=rank, size=size)
    problems += _contradictions(launcher, environ, (rank, size), (local_rank, local_size))
    if problems:
        raise LaunchError(problems, where=_error_location(launcher))
    return RankInfo(launcher, rank, size, local_rank, local_size)


def _read_int(environ: Environ, names: Sequence[str], problems: list[Problem]) -> int | None:
    name = _first_set(environ, names)
    if not name:
        return None
    if not environ[name].isdecimal():
        problems.append(Problem(f"{name} = {environ[name]}", "a whole number, at least 0"))
        return None
    return int(environ[name])


def _local_rank_and_size(
    launcher: Launcher, environ: Environ, problems: list[Problem], *, rank: int, size: int
) -> tuple[int, int]:
    """The local rank and the number of processes on this host."""
    if launcher is KUBERNETES:
        return 0, 1
    local_rank = _read_int(environ, launcher.local_rank_vars, problems)
    if launcher is SLURM:
        local_size = _slurm_local_size(environ, size, problems)
    else:
        local_size = _read_int(environ, launcher.local_size_vars, problems)
    if launcher is TORCHRUN:  # Kubernetes operators that set RANK themselves leave these out.
        return rank if local_rank is None else local_rank, size if local_size is None else local_size
    for value, names in ((local_rank, launcher.local_rank_vars), (local_size, launcher.local_size_vars)):
        if value is None and not problems and names:
            problems.append(Problem(f"no {names[0]}", "the rank of a process on its host", f"{names[-1]}=…"))
    return local_rank or 0, 1 if local_size is None else local_size


def _slurm_local_size(environ: Environ, size: int, problems: list[Problem]) -> int:
    name = _first_set(environ, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if not name:
        if environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES")) == "1":
            return size
        problems.append(Problem("no SLURM_TASKS_PER_NODE", "the number of tasks of each node", "srun --ntasks=N …"))
        return size
    try:
        tasks = parse_task_counts(environ[name])
        node = int(environ.get("SLURM_NODEID", "0"))
        if sum(tasks) == size:
            return tasks[node]
    except (ValueError, IndexError):
        got = f"{name} = {environ[name]}, SLURM_NODEID = {environ.get('SLURM_NODEID', '0')}"
        problems.append(Problem(got, 'counts such as "2(x3),1" and a node among them'))
        return size
    problems.append(Problem(f"{name} = {environ[name]}, {size} tasks", "counts that add up to the tasks"))
    return size


def _contradictions(
    launcher: Launcher, environ: Environ, world: tuple[int, int], local: tuple[int, int]
) -> list[Problem]:
    rank_names = (_first_set(environ, launcher.rank_vars), _first_set(environ, launcher.size_vars))
    local_names = (
        _first_set(environ, launcher.local_rank_vars),
        _first_set(environ, launcher.local_size_vars) or "processes of the host",
    )
    problems = [
        Problem(f"{names[0]} = {index}, {names[1]} = {size}", "a rank below the number of processes")
        for names, (index, size) in ((rank_names, world), (local_names, local))
        if index >= size and names[0]
    ]
    if local[1] > world[1]:
        got = f"{local_names[1]} = {local[1]}, {rank_names[1]} = {world[1]}"
        problems.append(Problem(got, "no more processes on a host than in the whole job"))
    return problems


def _missing_size_problem(launcher: Launcher, environ: Environ) -> Problem:
    rank = _first_set(environ, launcher.rank_vars)
    got = f"{rank} = {environ[rank]}, no {' or '.join(launcher.size_vars)}"
    attempt = f"{launcher.size_vars[0]}=N, or unset {rank}"
    if launcher is KUBERNETES:
        attempt = f"{launcher.size_vars[0]}=N in the pod's template (1 where pods train alone)"
    return Problem(got, "the number of processes", attempt)


def _error_location(launcher: Launcher) -> str:
    return f"the environment ({launcher.name})"
