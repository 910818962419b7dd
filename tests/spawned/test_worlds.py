"""Worlds that other launchers start (real mpirun, mpiexec, srun), and what they leave behind."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from fourfold.cli import main
from tests.ports import free_ports
from tests.spawned import SOURCE
from tests.spawned.test_launch import SECONDS, TASK, Ended

FOREIGN = ("OMPI_", "PMI_", "PMIX_", "MPI_", "PALS_", "SLURM_", "JOB_COMPLETION", "FOURFOLD_", "MASTER_", "LOCAL_")
CLUSTER_SECONDS = 20
PYTHON = sys.executable
ROOT = ("--oversubscribe", "--allow-run-as-root")
LM = ["train", "lm", "width=32", "layers=1", "heads=2", "length=16", "steps=3", "name=first"]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(SOURCE), inherited.get("PYTHONPATH", "")])
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(more or {})}


def run(command: Sequence[str], folder: Path, more: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end; past the time limit it is killed, with its children."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment(more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.communicate()
    return Ended(process.returncode, out, err)


def program(*names: str, says: str = "") -> str:
    """The first of these programs that is installed and whose version contains `says`; else the test is skipped."""
    for name in names:
        path = shutil.which(name)
        if path and says in subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout:
            return path
    pytest.skip(f"{' or '.join(names)} is not installed")


def open_mpi() -> list[str]:
    return [program("mpirun.openmpi", "mpirun", says="Open"), "-n", "2", *ROOT]


def mpich() -> list[str]:
    return [program("mpiexec.hydra", "mpirun.mpich", says="HYDRA"), "-n", "2"]


CONFIGURATION = """
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of one node on this host, for this file only; yields the environment variables that select it."""
    daemons = [program("slurmctld"), program("slurmd")]
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    text = CONFIGURATION.format(
        host=host, user=getpass.getuser(), folder=folder, ports=free_ports(2), cpus=os.cpu_count()
    )
    configuration.write_text(text)
    variables = {"SLURM_CONF": str(configuration)}
    with (folder / "log").open("w") as log:
        started = [
            subprocess.Popen([daemon, "-D", "-f", str(configuration)], env=environment(), stdout=log, stderr=log)
            for daemon in daemons
        ]
    try:
        if not comes_up(folder, variables):
            pytest.skip(f"slurm did not start within {CLUSTER_SECONDS} s: {(folder / 'log').read_text()[-300:]}")
        yield variables
    finally:
        for daemon in started:
            daemon.terminate()
        for daemon in started:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def comes_up(folder: Path, variables: Mapping[str, str]) -> bool:
    deadline = time.monotonic() + CLUSTER_SECONDS
    while time.monotonic() < deadline:
        # A waiting srun is the poll: it returns once the node is up.
        try:
            command = ["srun", "--immediate=5", "-n", "1", "true"]
            done = subprocess.run(command, cwd=folder, env=environment(variables), capture_output=True, timeout=10)
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            return True
    return False


Launch = Callable[[Sequence[str]], Ended]


@pytest.fixture(params=["Open MPI", "MPICH", "Slurm"])
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Launch:
    """A function that runs a command on two ranks, which have a temporary folder of their own."""
    more = request.getfixturevalue("cluster") if request.param == "Slurm" else {}
    command = {
        "Open MPI": open_mpi,
        "MPICH": mpich,
        "Slurm": lambda: ["srun", "-n", "2", "--overcommit", "--time=10"],
    }[request.param]()
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    # Set for the ranks only: Open MPI keeps sockets in TMPDIR, whose names must be short.
    def start(words: Sequence[str]) -> Ended:
        return run([*command, "env", f"TMPDIR={temporary}", *words], tmp_path, more)

    return start


JOIN = """
import sys
from fourfold.comm.init import init_communicator
comm = init_communicator()
rows = comm.all_gather_json([sys.argv[1], comm.rank])
if comm.rank == 0:
    print(f"{rows}\\n", end="", flush=True)
"""


def test_under_every_launcher_a_run_trains_and_the_next_program_can_join(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    ended = launch(["sh", "-c", f"{PYTHON} -m fourfold {' '.join(LM)} && {PYTHON} join.py second"])
    assert ended.code == 0, ended.err
    assert ended.out.count("step 3/3") == 1
    assert ended.out.count("2 ranks") == 1
    assert ended.out.splitlines()[-1] == "[['second', 0], ['second', 1]]"
    assert "\x1b" not in ended.out  # Open MPI gives ranks a terminal, although its own output is none
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]
    assert left_behind(tmp_path) == []


def left_behind(folder: Path) -> list[str]:
    """Files of rendezvous that are over."""
    return [path.name for path in (folder / "temporary").glob("fourfold-*/*")]


def test_a_rank_that_fails_ends_the_job_and_is_reported(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TASK.replace('"RANK") == "1"', '"LOCAL") == "1"'))
    script = 'case "$OMPI_COMM_WORLD_RANK$PMI_RANK$SLURM_PROCID" in 1*) export LOCAL=1;; esac\n'
    ended = launch(["sh", "-c", script + f"exec {PYTHON} -m fourfold train script.py broken=yes"])
    assert ended.code != 0
    assert "rank 1 of 2 failed" in ended.err
    assert "OSError: the disk of rank 1" in ended.err


DYING = TASK.replace("raise OSError(", "os.kill(os.getpid(), 9)  # (").replace('"RANK"', '"SLURM_PROCID"')


def test_under_srun_a_dead_rank_ends_the_others_with_the_requeue_exit_code(
    cluster: Mapping[str, str], tmp_path: Path
) -> None:
    # mpirun ends all ranks by itself; srun does so only with --kill-on-bad-exit.
    (tmp_path / "script.py").write_text(DYING)
    rank = f'{PYTHON} -m fourfold train script.py broken=yes; echo "$SLURM_PROCID ended with $?"'
    ended = run(["srun", "-n", "2", "--overcommit", "--time=10", "sh", "-c", rank], tmp_path, cluster)
    assert "0 ended with 75" in ended.out, ended.err
    assert "PeerError: rank 1 " in ended.err


WHO = "from fourfold.environment.world import from_environment; print(f'{from_environment()}\\n', end='', flush=True)"


def test_an_salloc_shell_and_a_batch_script_have_no_ranks(cluster: Mapping[str, str], tmp_path: Path) -> None:
    ended = run(["salloc", "-n", "2", "--overcommit", PYTHON, "-c", WHO], tmp_path, cluster)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "None"
    (tmp_path / "batch.sh").write_text(f'#!/bin/sh\nenv >variables\n{PYTHON} -c "{WHO}" >who\n')
    ended = run(["sbatch", "--wait", "-n", "2", "--overcommit", "--time=10", "batch.sh"], tmp_path, cluster)
    assert ended.code == 0, ended.err
    assert (tmp_path / "who").read_text() == "None\n"
    assert "SLURM_PROCID=0" in (tmp_path / "variables").read_text()  # else this test shows nothing


def test_pods_join_at_the_address_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    address = {"FOURFOLD_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    pods = [
        subprocess.Popen(
            [PYTHON, "join.py", "pod"],
            cwd=tmp_path,
            env=environment({**address, "JOB_COMPLETION_INDEX": str(index)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in (1, 0)
    ]
    try:
        outputs = [pod.communicate(timeout=SECONDS)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0]
    assert outputs == ["", "[['pod', 0], ['pod', 1]]\n"]


def test_a_missing_rendezvous_address_is_reported_without_a_traceback(tmp_path: Path, monkeypatch, capfd) -> None:
    for name in os.environ:
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)
    several_hosts = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }
    for name, value in several_hosts.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(LM)
    err = capfd.readouterr().err
    assert err.startswith("LaunchError: 1 problem in the environment (Open MPI)\n")
    assert "try mpirun -x MASTER_ADDR=host-of-rank-0" in err
    assert "Traceback" not in err
