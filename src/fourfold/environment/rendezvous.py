"""Rendezvous: where the processes of a job first find each other.

TCP       a host and a port where rank 0 listens
local     all processes run on one host and find each other in a private folder, by the job of their launcher
file      the ranks of our own launcher find each other in a file in its private folder, a new one per attempt
launcher  the nearest ancestor of a process whose environment lacks the rank's variable: mpirun, or its helper
Law: rank 0's host is never guessed: if the variables of a launcher do not determine it, a LaunchError asks for it. The
port has a default.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.environment import launchers
from fourfold.environment.launchers import KUBERNETES, TORCHRUN, RankInfo
from fourfold.environment.processes import ProcessId, has_variable, parent_pid, process_id
from fourfold.words.errors import LaunchError, Problem

DEFAULT_PORT = 29500  # torchrun's
# Ports derived from a job id: above the well-known ports, below those that Linux uses for outgoing connections.
FIRST_PORT, NUM_PORTS = 15000, 14000
STORE_VARIABLE = "FOURFOLD_STORE"
NODELIST_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
PORT_STRIDE = 31  # consecutive jobs, and the first steps of each, get different ports


@dataclass(frozen=True)
class TCPRendezvous:
    """Where rank 0 listens."""

    host: str
    port: int


@dataclass(frozen=True)
class LocalRendezvous:
    """One host.

    job       distinguishes this job from others on the host, as far as its launcher's variables can
    variable  an environment variable that every process of the job has
    """

    job: str
    variable: str

    def note_name(self) -> str:
        """The file where rank 0 notes the store of this start of this job."""
        key = json.dumps([self.job, *_launcher_process(self.variable)])
        return f"rendezvous-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


@dataclass(frozen=True)
class FileRendezvous:
    """A file in a folder that only this user may enter."""

    path: str


def store_file(environ: Mapping[str, str]) -> str | None:
    """The rendezvous file of our own launcher; None under another launcher, even if our launcher started that one."""
    # Our launcher starts ranks by torchrun's agent, which sets torchrun's variables. The store file's name ends with
    # the agent's run id; a torchrun that our launcher has started has another id.
    file, run = environ.get(STORE_VARIABLE, ""), environ.get("TORCHELASTIC_RUN_ID", "")
    if not run or not file.endswith(run):
        return None
    return f"{file}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def find_rendezvous(
    rank_info: RankInfo, environ: Mapping[str, str]
) -> TCPRendezvous | LocalRendezvous | FileRendezvous | None:
    """Where the ranks find each other; None if torch's own variables say so already. Raises LaunchError."""
    if rank_info.launcher is TORCHRUN:  # or our own launcher, which sets the same variables
        file = store_file(environ)
        return None if file is None else FileRendezvous(file)
    address = environ.get("MASTER_ADDR")
    if address:
        return TCPRendezvous(address, master_port(environ))
    if rank_info.launcher is KUBERNETES:
        return TCPRendezvous(_first_pod_address(rank_info, environ), master_port(environ))
    if rank_info.local_size == rank_info.size:
        names = [name for name in rank_info.launcher.rank_vars if environ.get(name)]
        return LocalRendezvous(
            " ".join([rank_info.launcher.name, *(environ.get(n, "") for n in rank_info.launcher.job_vars)]), names[0]
        )
    variable = next((name for name in NODELIST_VARIABLES if environ.get(name)), None)
    if variable is None:
        raise _missing_address_error(rank_info)
    nodes = environ[variable]
    try:
        return TCPRendezvous(launchers.first_host(nodes), master_port(environ))
    except ValueError:
        problem = Problem(f"{variable} = {nodes}", "a node list such as n[01-04]", _suggestion(rank_info))
        raise LaunchError(problem, where="the environment (Slurm)") from None


def master_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT, else a port derived from Slurm's job and step ids, else torch's default. Raises LaunchError."""
    text = environ.get("MASTER_PORT", "")
    if text:
        if text.isdecimal() and 0 < int(text) < 65536:
            return int(text)
        raise LaunchError(Problem(f"MASTER_PORT = {text}", "a port, 1 to 65535", f"MASTER_PORT={DEFAULT_PORT}"))
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not job.isdecimal():
        return DEFAULT_PORT
    return FIRST_PORT + (int(job) * PORT_STRIDE + (int(step) if step.isdecimal() else 0)) % NUM_PORTS


def _launcher_process(variable: str) -> ProcessId:
    """The nearest ancestor outside of the rank; shells and wrappers may lie between it and this process."""
    pid = parent_pid(os.getpid())
    while pid > 1 and has_variable(pid, variable):
        pid = parent_pid(pid)
    return process_id(pid)


def _first_pod_address(rank_info: RankInfo, environ: Mapping[str, str]) -> str:
    """The address of pod 0 of an Indexed Job: its name is JOB-0, and the job's headless service resolves it."""
    service, name = environ.get("FOURFOLD_SERVICE", ""), environ.get("HOSTNAME", "")
    if not service:
        raise _missing_address_error(rank_info)
    if not name.endswith(f"-{rank_info.rank}"):
        got = f"FOURFOLD_SERVICE = {service}, HOSTNAME = {name or '(nothing)'}"
        raise LaunchError(
            Problem(got, f"a host name ending in -{rank_info.rank}", "MASTER_ADDR=…"), where="the environment"
        )
    return f"{name.removesuffix(str(rank_info.rank))}0.{service}"


def _missing_address_error(rank_info: RankInfo) -> LaunchError:
    got = f"{rank_info.size} processes on several hosts, no MASTER_ADDR"
    return LaunchError(
        Problem(got, "the host of rank 0", _suggestion(rank_info)), where=f"the environment ({rank_info.launcher.name})"
    )


def _suggestion(rank_info: RankInfo) -> str:
    if rank_info.launcher is KUBERNETES:
        return "FOURFOLD_SERVICE=the job's headless service (its pods' subdomain), or MASTER_ADDR=…"
    return rank_info.launcher.hint.format("MASTER_ADDR=host-of-rank-0")
