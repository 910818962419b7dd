"""Laws of launchers: which ranks and sizes follow from their environment variables, and which rendezvous."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.environment import launchers
from fourfold.environment.launchers import LAUNCHERS, detect
from fourfold.environment.rendezvous import (
    FIRST_PORT,
    NUM_PORTS,
    FileRendezvous,
    LocalRendezvous,
    TCPRendezvous,
    find_rendezvous,
    master_port,
)
from fourfold.environment.world import World, from_environment
from fourfold.launcher.notebook import launch
from fourfold.words.errors import LaunchError


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_RANK=3 PMIX_NAMESPACE=191299585"
)
MPICH = "PMI_RANK=3 PMI_SIZE=4 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
PALS = "PALS_RANKID=3 PMI_SIZE=4 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_APID=abc"
STEP = (
    "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NNODES=2 "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_NODELIST=gpu[07-08]"
)
PODS = "JOB_COMPLETION_INDEX=3 FOURFOLD_WORLD_SIZE=4 HOSTNAME=train-3"

RANK_3_OF_4 = {
    "torchrun": TORCHRUN,
    "Open MPI": OPEN_MPI,
    "MPICH": MPICH,
    "PALS": PALS,
    "Slurm": STEP,
    "Slurm with pmi2": f"{STEP} PMI_RANK=3 PMI_SIZE=4",
    "Slurm with pmix": f"{STEP} PMIX_RANK=3",
    "PMIx": "PMIX_RANK=3 FOURFOLD_WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
}


@pytest.mark.parametrize("name", RANK_3_OF_4)
def test_every_launcher_gives_the_same_rank_info(name: str) -> None:
    assert from_environment(variables(RANK_3_OF_4[name])) == World(rank=3, size=4, local_rank=1, local_size=2)


def test_a_pod_of_an_indexed_job_is_a_host_of_its_own() -> None:
    assert from_environment(variables(PODS)) == World(rank=3, size=4, local_rank=0, local_size=1)
    by_job = variables("JOB_COMPLETION_INDEX=3 JOB_COMPLETIONS=5")
    assert from_environment(by_job) == World(rank=3, size=5, local_rank=0, local_size=1)


NO_WORLD = {
    "nothing": "",
    "an salloc shell": "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_NNODES=2 SLURM_JOB_NODELIST=n[1-2]",
    "an salloc shell run as an interactive step": STEP.replace("SLURM_STEP_ID=0", "SLURM_STEP_ID=4294967290"),
    "a batch script": STEP.replace("SLURM_STEP_ID=0", ""),
    "a batch step": STEP.replace("SLURM_STEP_ID=0", "SLURM_STEP_ID=4294967291"),
    "one task of srun": "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_NNODES=1",
    "one pod": "JOB_COMPLETION_INDEX=0 FOURFOLD_WORLD_SIZE=1",
    "a size without a rank": "WORLD_SIZE=4",
}


@pytest.mark.parametrize("name", NO_WORLD)
def test_an_environment_without_ranks_gives_no_world(name: str) -> None:
    assert from_environment(variables(NO_WORLD[name])) is None


NESTED = {
    "torchrun inside srun": (f"{STEP} RANK=0 WORLD_SIZE=8 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4", World(0, 8, 0, 4)),
    "mpirun inside salloc": (f"{NO_WORLD['an salloc shell']} {OPEN_MPI}", World(3, 4, 1, 2)),
    "mpirun whose helpers srun has started": (
        f"{OPEN_MPI} SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
        World(3, 4, 1, 2),
    ),
    "mpiexec whose helpers srun has started": (
        f"{MPICH} SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
        World(3, 4, 1, 2),
    ),
    "torchrun inside a pod": (f"JOB_COMPLETION_INDEX=1 {TORCHRUN}", World(3, 4, 1, 2)),
}


@pytest.mark.parametrize("name", NESTED)
def test_the_inner_of_two_nested_launchers_decides(name: str) -> None:
    text, world = NESTED[name]
    assert from_environment(variables(text)) == world


INVALID = {
    "RANK=1": "no WORLD_SIZE",
    "RANK=4 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2": "RANK = 4, WORLD_SIZE = 4",
    "RANK=one WORLD_SIZE=two": "2 problems",
    "RANK=-1 WORLD_SIZE=2": "RANK = -1",
    f"{OPEN_MPI} OMPI_COMM_WORLD_LOCAL_SIZE=5": "no more processes on a host",
    f"{MPICH} MPI_LOCALRANKID=2": "MPI_LOCALRANKID = 2, MPI_LOCALNRANKS = 2",
    "PMI_RANK=0 PMI_SIZE=2": "no MPI_LOCALRANKID",
    "PMIX_RANK=1": "try FOURFOLD_WORLD_SIZE=N",
    "JOB_COMPLETION_INDEX=1": "no FOURFOLD_WORLD_SIZE or JOB_COMPLETIONS",
    f"{STEP} SLURM_TASKS_PER_NODE=2,1": "counts that add up",
    f"{STEP} SLURM_TASKS_PER_NODE=2(3": "SLURM_TASKS_PER_NODE = 2(3",
    f"{STEP} SLURM_NODEID=2": "a node among them",
    STEP.replace("SLURM_TASKS_PER_NODE=2(x2)", ""): "no SLURM_TASKS_PER_NODE",
}


@pytest.mark.parametrize("text", INVALID)
def test_contradictory_and_missing_variables_are_reported(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        from_environment(variables(text))
    assert INVALID[text] in str(caught.value)


def rendezvous_of(text: str) -> TCPRendezvous | LocalRendezvous | FileRendezvous | None:
    environ: Mapping[str, str] = variables(text)
    rank_info = detect(environ)
    assert rank_info is not None
    return find_rendezvous(rank_info, environ)


ONE_HOST = OPEN_MPI.replace("LOCAL_SIZE=2", "LOCAL_SIZE=4")


def test_the_rendezvous_follows_from_the_launchers_variables() -> None:
    assert rendezvous_of(TORCHRUN) is None  # torch reads MASTER_ADDR and MASTER_PORT itself
    assert rendezvous_of(f"{OPEN_MPI} MASTER_ADDR=a") == TCPRendezvous("a", 29500)
    assert rendezvous_of(f"{ONE_HOST} MASTER_ADDR=a MASTER_PORT=7") == TCPRendezvous("a", 7)
    assert rendezvous_of(ONE_HOST) == LocalRendezvous("Open MPI 191299585", "OMPI_COMM_WORLD_RANK")
    assert rendezvous_of(f"{STEP} MASTER_PORT=7") == TCPRendezvous("gpu07", 7)
    assert rendezvous_of(f"{STEP} SLURM_STEP_NODELIST=gpu08") == TCPRendezvous("gpu08", master_port(variables(STEP)))
    assert rendezvous_of(f"{OPEN_MPI} SLURM_JOB_ID=77 SLURM_JOB_NODELIST=n[1-2]") == TCPRendezvous(
        "n1", master_port(variables(STEP))
    )
    assert rendezvous_of(f"{PODS} FOURFOLD_SERVICE=svc MASTER_PORT=7") == TCPRendezvous("train-0.svc", 7)


@pytest.mark.parametrize(
    ("text", "attempt"),
    [
        (OPEN_MPI, "mpirun -x MASTER_ADDR=host-of-rank-0"),
        (MPICH, "mpiexec -genv MASTER_ADDR=host-of-rank-0"),
        (PODS, "FOURFOLD_SERVICE="),
        (f"{PODS} FOURFOLD_SERVICE=svc HOSTNAME=other", "MASTER_ADDR="),
        (STEP.replace("[07-08]", "[07"), "MASTER_ADDR=host-of-rank-0 srun"),
        (f"{STEP} MASTER_PORT=high", "MASTER_PORT=29500"),
    ],
)
def test_a_rendezvous_that_cannot_be_derived_is_refused_with_what_to_set(text: str, attempt: str) -> None:
    with pytest.raises(LaunchError, match=attempt.replace("(", "\\(")):
        rendezvous_of(text)


@given(st.integers(1, 2**26), st.integers(0, 20))
def test_consecutive_jobs_and_their_steps_have_different_ports(job: int, step: int) -> None:
    def of(job: int, step: int) -> int:
        return master_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})

    assert FIRST_PORT <= of(job, step) < FIRST_PORT + NUM_PORTS < 32768  # where Linux begins to hand out ports
    assert len({of(job + i, j) for i in range(3) for j in (step, step + 1)}) == 6


def test_no_two_launchers_share_a_rank_variable() -> None:
    names = [name for launcher in LAUNCHERS for name in launcher.rank_vars]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "first"),
    [
        *[("n1", "n1"), ("gpu[08-10,3],login", "gpu08"), ("r[0-1]n[1-2]x,r[2-1", None), ("r[0-1]n[1-2]x,m", "r0n1x")],
        *[("n[1-999999999999]", "n1"), ("rack5-3", "rack5-3"), ("n[7,1-2]", "n7"), ("login,n[1-2]", "login")],
        *[(text, None) for text in ("", "n[", "n[1", "n1]", "n[1-]", "n[a]", "n[2-1]", "a,,b", "n[[1]]", "n[1] b")],
    ],
)
def test_the_first_host_of_a_slurm_node_list(text: str, first: str | None) -> None:
    if first is not None:
        assert launchers.first_host(text) == first
        return
    with pytest.raises(ValueError, match="node list"):
        launchers.first_host(text)


def test_the_tasks_of_each_node() -> None:
    assert launchers.parse_task_counts("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize("given", [3, {"loss": 0.5}, None])
def test_a_launch_of_what_is_no_function_is_refused_before_a_fork(given: Any) -> None:
    with pytest.raises(LaunchError, match=r"need a function that every rank calls   try ff.launch\(train, n=2\)"):
        launch(given, n=2)
