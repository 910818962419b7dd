"""Processes: started, joined, and ended in every way. The first cause is reported once, with its rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from fourfold.cli import errors, main
from fourfold.environment.malloc import TUNABLES_VARIABLE
from fourfold.environment.world import num_cores
from fourfold.launcher.process_defaults import THREAD_VARIABLES
from tests.spawned import SOURCE

SECONDS = 180  # the time limit of a command; on an idle machine it takes three
FOURFOLD = ("-m", "fourfold")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *FOURFOLD)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python …` in a folder with script.py. At the end of the test, all processes are ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str, arguments: Sequence[str], *, launcher: Sequence[str] = FOURFOLD) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(script)
        foreign = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            *THREAD_VARIABLES,
            TUNABLES_VARIABLE,
            "GLOO_SOCKET_IFNAME",
        )
        environment = {name: value for name, value in os.environ.items() if name not in foreign}
        environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, *launcher, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=SECONDS)
    return Ended(process.returncode, out, err)


WAITING = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.write("ready\\n"); sys.stdout.flush()
while True:
    signal.pause()
"""


def test_the_first_cause_is_reported_once_and_ranks_that_hang_are_killed(start: Start) -> None:
    script = (
        "import os\n"
        "def check(value):\n"
        "    raise ValueError(f'bad {value}')\n"
        "if os.environ['RANK'] == '1':\n"
        "    check(3)\n" + WAITING
    )
    process = start(script, ["run", "-n", "3", "script.py"])
    for _ in range(2):
        assert process.stdout is not None
        process.stdout.readline()
    ended = end(process)
    assert ended.code == 1
    assert ended.err == (
        "fourfold: rank 1 of 3 failed\n"
        "Traceback (most recent call last):\n"
        '  File "script.py", line 5, in <module>\n'
        "    check(3)\n"
        '  File "script.py", line 3, in check\n'
        "    raise ValueError(f'bad {value}')\n"
        "ValueError: bad 3\n"
    )


def test_errors_that_follow_from_the_first_are_not_reported(start: Start) -> None:
    script = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    raise KeyError('the cause')\n"
        "dist.barrier()\n"
    )
    ended = end(start(script, ["run", "-n", "2", "script.py"]))
    assert ended.code == 1
    assert ended.err.startswith("fourfold: rank 1 of 2 failed\n")
    assert ended.err.endswith("KeyError: 'the cause'\n")
    assert ended.err.count("Traceback") == 1
    assert ended.err.count("\n") == 5


DYING_SLOWLY = """
import os, signal, time
from pathlib import Path
from fourfold.words.errors import PeerError
signal.signal(signal.SIGTERM, signal.SIG_IGN)
survivor = Path("survivor")
if os.environ["RANK"] == "0":
    survivor.write_text(str(os.getpid()))
    raise PeerError("rank 1 died")
while not (survivor.exists() and survivor.read_text()) or Path("/proc", survivor.read_text()).exists():
    time.sleep(0.01)  # until the launcher has seen the end of rank 0
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_dies_slowly_is_the_cause_though_its_peer_ends_first(start: Start) -> None:
    ended = end(start(DYING_SLOWLY, ["run", "-n", "2", "script.py"]))
    assert ended.code == 1
    assert ended.err.startswith("fourfold: rank 1 of 2 was killed by SIGKILL"), ended.err


LEAVING = """
import atexit, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    dist.destroy_process_group()
    atexit.register(time.sleep, 0.5)  # it is still exiting when rank 0 has failed already
    sys.exit(0)
dist.barrier()
"""


def test_a_rank_that_exits_while_others_wait_is_reported_and_not_restarted(start: Start) -> None:
    ended = end(start(LEAVING, ["run", "-n", "2", "--restarts", "2", "script.py"]))
    assert "starting again" not in ended.err
    assert ended.code == 1, ended.err
    assert ended.err.startswith("fourfold: rank 1 of 2 ended normally while rank 0 still waited for it\n")
    assert "\nrank 0 waited here\n" in ended.err
    assert '"script.py", line 10, in <module>\n    dist.barrier()\n' in ended.err


LATE_SIGNAL = """
import os, signal
from fourfold.launcher import local_job
end = local_job.Agent.clean_up
local_job.Agent.clean_up = lambda agent: (end(agent), os.kill(os.getpid(), signal.SIGTERM))
print(local_job.launch(["script.py"], num_processes=2))
"""


def test_a_signal_that_comes_when_all_ranks_have_ended_is_not_lost_and_changes_no_result(start: Start) -> None:
    ended = end(start("", ["-c", LATE_SIGNAL], launcher=()))
    assert ended.out == f"JobResult(exit_code=0, text='', stop_code={128 + signal.SIGTERM})\n", ended.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_ends_every_process(start: Start, number: signal.Signals, code: int) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends the ranks of a launcher that was killed")
    process = start(WAITING, ["run", "-n", "2", "script.py"])
    check_signal_ends_all(process, number, code)


def test_a_job_under_nohup_outlives_its_terminal_and_ends_at_sigterm(start: Start) -> None:
    ignored = "import os, sys; from signal import *; signal(SIGHUP, SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    process = start(WAITING, [sys.executable, *FOURFOLD, "run", "-n", "2", "script.py"], launcher=("-c", ignored))
    check_signal_ends_all(process, signal.SIGTERM, 143, ignored=signal.SIGHUP)


def check_signal_ends_all(
    process: subprocess.Popen[str], number: signal.Signals, code: int, *, ignored: signal.Signals | None = None
) -> None:
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    if ignored is not None:
        process.send_signal(ignored)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    process.send_signal(number)
    ended = end(process)  # also waits for the ranks, which hold the other end of the pipes
    assert ended.code == code
    assert "Traceback" not in ended.err
    # A process closes its pipes a moment before it is gone.
    deadline = time.monotonic() + 10
    while [child for child in children if alive(child)] and time.monotonic() < deadline:
        os.sched_yield()
    assert not [child for child in children if alive(child)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ARGUMENTS = """
import os, sys
variables = "RANK WORLD_SIZE LOCAL_RANK OMP_NUM_THREADS MKL_NUM_THREADS".split()
words = *(os.environ.get(name) for name in variables), sys.argv, sys.path[0] == os.getcwd(), __name__
print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # one write, even if Python does not buffer
sys.exit(7)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_script_gets_its_own_arguments_and_its_exit_code_is_passed_on(start: Start, size: int) -> None:
    words = ["run", "-n", str(size), "--restarts", "2"]
    arguments = ["script.py", "-n", "5", "--help", "a=b", "--", "$RANK ${local_rank}", ""]
    ended = end(start(ARGUMENTS, [*words, *arguments]))
    assert ended.code == 7, ended.err
    lines = sorted(ended.out.splitlines())
    # A rank that ends with an exit code ends the job, perhaps before the other has printed.
    assert 1 <= len(lines) <= size
    for line in lines:
        assert line.endswith(f"{arguments} True __main__")
    if size == 1:
        assert lines[0].startswith("None None None")
        assert ended.err == ""
    else:
        threads = str(max(1, num_cores() // size))
        assert lines[0].split()[1] == "2"
        assert lines[0].split()[3:5] == [threads, threads]
        assert "called sys.exit and ended with exit code 7" in ended.err
        assert "starting again" not in ended.err


TASK = """
import torch
import fourfold as ff


class Source:
    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 64

    def __getitem__(self, index):
        import os
        if self.broken and os.environ.get("RANK") == "1":
            raise OSError("the disk of rank 1")
        return torch.full((4,), 0.01 * index), torch.tensor([0.0])


def task(*, broken: bool = False):
    return ff.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda outputs, targets: (outputs - targets) ** 2,
        data=lambda: ff.Data(train=Source(broken)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        steps=4,
        batch_size=8,
    )
"""


def test_under_another_launcher_only_rank_0_reports_bad_input(tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "script.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(errors, "SILENT_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["train", "script.py", "stebs=3"])
        assert capfd.readouterr().err.count("stebs = 3") == (1 if rank == "0" else 0)


HEAP = """
import ctypes, os, sys
if os.environ["RANK"] == "1":
    sys.exit(0)  # one rank is enough
import torch
from fourfold.torch_kit import memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f g h i".split()]

library, size = ctypes.CDLL(None), 2**24
library.mallinfo2.restype = Info
assert memory.keep_freed_memory()
for step in range(30):
    large, small = torch.empty(size + 64 * (step % 3 == 0), dtype=torch.uint8), torch.empty(128, dtype=torch.uint8)
    del large
    again = torch.empty(size, dtype=torch.uint8)
    del again, small
    begin = library.mallinfo2().arena if step == 0 else begin
print(f"{(library.mallinfo2().arena - begin) // size}\\n", end="")  # in one piece
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_reused_for_tensors_of_the_same_size(start: Start) -> None:
    # With glibc's tcache the heap grows by four to seven such tensors, without it by two at most.
    ended = end(start(HEAP, ["run", "-n", "2", "script.py"]))
    assert ended.code == 0, ended.err
    assert int(ended.out) <= 3


LEFT_BEHIND = """
import gc, os, sys, time
import torch, torch.distributed as dist
import fourfold as ff


def threads(listdir=os.listdir, open=os.open, read=os.read, close=os.close, OSError=OSError):
    number = 0
    for thread in listdir("/proc/self/task"):
        try:
            file = open(f"/proc/self/task/{thread}/comm", 0)
            number += b"gloo" in read(file, 99)
            close(file)
        except OSError:
            pass
    return number


class Last:
    def __del__(self, threads=threads, sleep=time.sleep, write=os.write):
        # The kernel lists a thread for a while after it has ended.
        for turn in range(20):
            if turn and threads():
                sleep(0.1)
        write(1, b"%d threads of gloo\\n" % threads())


BATCH = torch.ones(2, 4), torch.ones(2, 1)


def train():
    model, loss = torch.nn.Linear(4, 1), torch.nn.MSELoss(reduction="none")
    step = ff.parallelize(model, loss, torch.optim.AdamW, ff.Plan(dp=2, transport="gloo"))
    step(BATCH)
    return step


if sys.argv[1] == "theirs":
    dist.init_process_group("gloo")
sys.kept, forgotten = train(), train()
del forgotten
gc.collect()
if os.fork() == 0:
    sys.exit(0)
assert os.wait()[1] == 0
sys.kept(BATCH)
sys.ps2 = Last()  # Python deletes the prompts first, right after the atexit functions
"""


@pytest.mark.parametrize("joined", ["ours", "theirs"])
def test_no_gloo_thread_runs_at_interpreter_shutdown_and_a_fork_does_not_destroy_groups(start: Start, joined: str):
    """A thread of gloo that frees a tensor during the interpreter's shutdown aborts the process."""
    ended = end(start(LEFT_BEHIND, ["run", "-n", "2", "script.py", joined]))
    assert ended.code == 0, ended.err
    assert ended.out == 2 * "0 threads of gloo\n"


PRIVATE = """
import os, stat
from pathlib import Path
import psutil
import torch, torch.distributed as dist
from fourfold.comm.init import init_communicator

for again in range(2):
    dist.init_process_group("gloo")
    dist.barrier()
    if not again:
        dist.destroy_process_group()
ranks = init_communicator()
file = next(Path(os.environ["FOURFOLD_STORE"]).parent.glob("store-*"))
with open(file, "rb") as store:
    keys = store.read()
assert b"default_pg" in keys, keys
mode = stat.S_IMODE(file.parent.stat().st_mode)
found = [("folder", oct(mode), file.parent.stat().st_uid == os.getuid())]
for process in psutil.Process(os.getppid()), psutil.Process():
    found += [place.laddr.ip for place in process.net_connections() if place.status == psutil.CONN_LISTEN]
ranks.all_gather_json("seen")
if ranks.rank == 0:
    print(found, os.environ["GLOO_SOCKET_IFNAME"])
dist.destroy_process_group()
# The script's own store, at MASTER_PORT.
own = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=ranks.rank == 0)
own.set(f"here {ranks.rank}", "")
own.wait(["here 0", "here 1"])
"""


def test_other_users_cannot_reach_the_store_of_a_job(start: Start) -> None:
    """The launcher listens at no port. Only gloo does, in the ranks, at the loopback device."""
    ended = end(start(PRIVATE, ["run", "-n", "2", "script.py"]))
    assert ended.code == 0, ended.err
    assert ended.out == "[('folder', '0o700', True), '127.0.0.1'] lo\n"


MPI = """
import os, sys
from pathlib import Path
from fourfold.comm.init import init_communicator
ranks = init_communicator()
folder = Path(os.environ["TMPDIR"]) / f"fourfold-{os.getuid()}"
names = sorted(file.name.split("-")[0] for file in folder.iterdir())
ranks.all_gather_json("seen")
print(ranks.all_gather_json(ranks.rank), names)
"""


def start_under_mpi(start: Start, script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Ended]:
    """Two ranks as mpiexec starts them: only the children have a rank's variables."""
    monkeypatch.setenv("TMPDIR", str(folder))
    for name in ("MASTER_ADDR", "MASTER_PORT", "FOURFOLD_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PMI_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "2")
    ranks = []
    for rank in "01":
        monkeypatch.setenv("PMI_RANK", rank)
        monkeypatch.setenv("MPI_LOCALRANKID", rank)
        ranks.append(start(script, ["script.py"], launcher=()))
    return [end(rank) for rank in ranks]


def test_ranks_of_mpi_on_one_host_join_through_a_private_file(start: Start, tmp_path: Path, monkeypatch) -> None:
    for ended in start_under_mpi(start, MPI, tmp_path, monkeypatch):
        assert ended.code == 0, ended.err
        assert ended.out == "[0, 1] ['store']\n"


GIVEN_UP = """
import gc
import torch
from fourfold.comm import process_group_lifecycle
from fourfold.comm.init import init_communicator

process_group_lifecycle.DESTROY_TIMEOUT_SECONDS = 1.0
ones = torch.ones(4)


def give_up():
    ranks = init_communicator()
    group = ranks.get_group([0, 1], "calls that do not match")
    return group.all_reduce(ones) if ranks.rank else group.all_gather(ones, ones[:2])


give_up()
gc.collect()
give_up()  # here the group of the first call would end
print("and here I am\\n", end="")
raise RuntimeError("every rank has had enough")
"""


def test_an_abandoned_collective_does_not_block_the_exit_of_a_rank(start: Start, tmp_path: Path, monkeypatch) -> None:
    """Gloo would destroy the group after its collective, which never ends: all ranks wait in it."""
    for ended in start_under_mpi(start, GIVEN_UP, tmp_path, monkeypatch):
        assert ended.code != 0
        assert ended.out == "and here I am\n"
        assert "every rank has had enough" in ended.err
        assert "an abandoned collective has not ended in 1 s: this process ends without it" in ended.err
        assert "terminate called" not in ended.err
