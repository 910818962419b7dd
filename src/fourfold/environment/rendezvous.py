"""Rendezvous: where the processes of a job meet for the first time.

address    a host and a port where rank 0 listens
same host  all processes run on one host: they meet in a private folder, by the launcher that started them
file       where the ranks of our own launcher meet: in its private folder, each attempt in a file of its own
Law: nothing is guessed. What cannot be derived from what a launcher says is asked for (LaunchError).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.environment import slurm_hostlist
from fourfold.environment.launchers import KUBERNETES, TORCHRUN, RankInfo
from fourfold.words.errors import LaunchError, Problem

DEFAULT_PORT = 29500  # as torchrun has it
# Ports derived from a job's id: above the well known ones, below the range Linux takes for outgoing connections.
FIRST_PORT, NUM_PORTS = 15000, 14000
STORE_VARIABLE = "FOURFOLD_STORE"
PORT_STRIDE = 31  # so that jobs in a row, and the first steps of each, have ports of their own


@dataclass(frozen=True)
class TCPRendezvous:
    """Where rank 0 listens."""

    host: str
    port: int


@dataclass(frozen=True)
class LocalRendezvous:
    """One host. `job` sets this job apart as far as its variables can; `variable` is set in every process of it."""

    job: str
    variable: str


@dataclass(frozen=True)
class FileRendezvous:
    """A file in a folder that only this user may enter."""

    path: str


def store_file(environ: Mapping[str, str]) -> str | None:
    """The file in which the ranks of our own launcher meet; None under another launcher, which it may have started."""
    file, run = environ.get(STORE_VARIABLE, ""), environ.get("TORCHELASTIC_RUN_ID", "")
    if not run or not file.endswith(run):
        return None
    return f"{file}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def find_rendezvous(
    rank_info: RankInfo, environ: Mapping[str, str]
) -> TCPRendezvous | LocalRendezvous | FileRendezvous | None:
    """Where to meet; None where torch's own variables say it all. Raises LaunchError."""
    if rank_info.launcher is TORCHRUN:
        file = store_file(environ)
        return None if file is None else FileRendezvous(file)
    given = environ.get("MASTER_ADDR")
    if given:
        return TCPRendezvous(given, master_port(environ))
    if rank_info.launcher is KUBERNETES:
        return TCPRendezvous(_first_pod_address(rank_info, environ), master_port(environ))
    if rank_info.local_size == rank_info.size:
        names = [name for name in rank_info.launcher.rank_vars if environ.get(name)]
        return LocalRendezvous(
            " ".join([rank_info.launcher.name, *(environ.get(n, "") for n in rank_info.launcher.job_vars)]), names[0]
        )
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not listed:
        raise _missing_address_error(rank_info)
    try:
        return TCPRendezvous(next(slurm_hostlist.expand_nodelist(listed)), master_port(environ))
    except ValueError:
        problem = Problem(f"SLURM_JOB_NODELIST = {listed}", "a node list such as n[01-04]", _suggestion(rank_info))
        raise LaunchError(problem, where="the environment (Slurm)") from None


def master_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT, else one from Slurm's job and step, else torch's default. Raises LaunchError."""
    text = environ.get("MASTER_PORT", "")
    if text:
        if text.isdecimal() and 0 < int(text) < 65536:
            return int(text)
        raise LaunchError(Problem(f"MASTER_PORT = {text}", "a port, 1 to 65535", f"MASTER_PORT={DEFAULT_PORT}"))
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not job.isdecimal():
        return DEFAULT_PORT
    return FIRST_PORT + (int(job) * PORT_STRIDE + (int(step) if step.isdecimal() else 0)) % NUM_PORTS


def _first_pod_address(seat: RankInfo, environ: Mapping[str, str]) -> str:
    """Pod 0 of an Indexed Job: it is called JOB-0, and found through the job's headless service."""
    service, name = environ.get("FOURFOLD_SERVICE", ""), environ.get("HOSTNAME", "")
    if not service:
        raise _missing_address_error(seat)
    if not name.endswith(f"-{seat.rank}"):
        got = f"FOURFOLD_SERVICE = {service}, HOSTNAME = {name or '(nothing)'}"
        raise LaunchError(Problem(got, f"a host name ending in -{seat.rank}", "MASTER_ADDR=…"), where="the environment")
    return f"{name.removesuffix(str(seat.rank))}0.{service}"


def _missing_address_error(seat: RankInfo) -> LaunchError:
    got = f"{seat.size} processes on several hosts, no MASTER_ADDR"
    return LaunchError(
        Problem(got, "the host of rank 0", _suggestion(seat)), where=f"the environment ({seat.launcher.name})"
    )


def _suggestion(seat: RankInfo) -> str:
    if seat.launcher is KUBERNETES:
        return "FOURFOLD_SERVICE=the job's headless service (its pods' subdomain), or MASTER_ADDR=…"
    return seat.launcher.hint.format("MASTER_ADDR=host-of-rank-0")
