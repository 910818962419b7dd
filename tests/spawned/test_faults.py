"""Faults of real runs: ranks are killed, suspended, told to stop; training resumes as if uninterrupted."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from fourfold.cli import main
from fourfold.trace.trace_file import decode_trace
from tests.ports import free_ports
from tests.spawned import SOURCE
from tests.spawned.test_resume import equal, losses

SECONDS = 600  # the time limit of a command; on an idle machine the longest takes fifteen
HOST = socket.gethostname()

# At a call of the loss, `later` calls further on in every attempt, rank 1 and rank 0 by turns do what is next in the
# list `what`, and leave a mark; as long as there are fewer than `times`.
# With a comma in `what`, the command would ask the task whether this is a sweep: the launcher would import torch for
# that, and its ranks, no longer forks, would each import it again.
TASK = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch
import fourfold as ff

RANK = int(os.environ.get("RANK", "0"))
SEVERAL = os.environ.get("WORLD_SIZE", "1") != "1"
if RANK == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    time.sleep(1)  # long enough for rank 0 to read what the last attempt left in a store that is not fresh


class Source:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), 0.01 * index), torch.tensor([0.0])


class Loss:
    def __init__(self, what, times, at, later):
        self.what, self.times, self.at, self.later = what, times, at, later
        self.calls = -int(SEVERAL)  # a dry run calls the loss once before the first step, and believes a pair

    def __call__(self, outputs, targets):
        self.calls += torch.is_grad_enabled()  # not in evaluations
        done = len(list(Path(".").glob("mark-*")))
        if self.calls == self.at + self.later * done and done < self.times and RANK == (done + 1) % 2:
            Path(f"mark-{done}").write_text(str(time.time()))
            what = self.what.split("+")
            getattr(self, what[done % len(what)])()
        return ((outputs - targets) ** 2).sum(), len(targets)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def terminate(self):
        os.kill(os.getpid(), signal.SIGTERM)

    def kill_launcher(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(30)  # the kernel ends the ranks of a launcher that is gone

    def interrupt(self):
        seen, handler = [], signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *got: (seen.append(1), handler(*got)))
        os.killpg(os.getpgid(os.getppid()), signal.SIGINT)  # as a terminal does it
        while not seen:
            time.sleep(0.01)

    def stick(self):
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # in C, for ever; Python runs no handler meanwhile
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(30)  # it is woken for a moment, to say where it is

    def hang(self):
        while True:
            time.sleep(0.01)

    def leave(self):
        os._exit(0)

    def exit(self):
        sys.exit(0)

    def quit(self):
        sys.exit(3)

    def fail(self):
        raise RuntimeError("the disk of this rank")


def task(*, what: str = "kill", times: int = 0, at: int = 4, later: int = 1):
    return ff.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=Loss(what, times, at, later),
        data=lambda: ff.Data(train=Source()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        steps=30,
        batch_size=8,
    )
"""
STEPS = ("train", "script.py", "checkpoint_every=2", "name=first")
TRAIN = (*STEPS, "hang_seconds=100")  # a busy machine is no rank that hangs


class Job:
    """`fourfold WORDS` in a folder of its own, or one process of a launcher of others."""

    def __init__(self, folder: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
        foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        environ = {name: value for name, value in os.environ.items() if name not in foreign}
        environ |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **variables}
        pipe = subprocess.PIPE
        command = [str(Path(sys.executable).with_name("fourfold")), *words]  # as users start it
        self.process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self.out = self.err = ""

    def end(self, seconds: float = SECONDS) -> int:
        self.out, self.err = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `fourfold WORDS` in the folder of script.py; kills what is left at the end of the test."""
    (tmp_path / "script.py").write_text(TASK)
    jobs: list[Job] = []

    def begin(*words: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path, words, variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            for rank in job.ranks():
                rank.kill()
            job.process.kill()
            job.process.communicate()


TrainHere = Callable[..., str]


@pytest.fixture
def train_here(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> TrainHere:
    """Trains script.py on one rank, in this process, in the folder of `start` or another; returns what is printed."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def train(*words: str, code: int = 0, folder: Path = tmp_path) -> str:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main([*TRAIN, *words, "-n", "1"])
        out, err = capfd.readouterr()
        assert ended.value.code == code, err
        return out + err

    return train


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "script.py").write_text(TASK)
    job = Job(folder, [*TRAIN, "-n", "2"], {})
    assert job.end() == 0, job.err
    return folder / "runs" / "first"


def faults(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]


def test_ranks_that_die_hang_or_stop_are_reported_and_restarted_without_changing_the_result(
    start: Start, uninterrupted: Path, tmp_path: Path
):
    """Rank 1 joins each restart late, and finds rank 0."""
    job = start(*STEPS, "what=kill+hang+stop+leave", "times=4", "hang_seconds=5", "-n", "2")
    assert job.end() == 0, job.err
    run = tmp_path / "runs" / "first"
    assert equal(run, uninterrupted)
    assert losses(run) == losses(uninterrupted)
    found = faults(run)
    expected = [("restart", 1), ("hung", 0), ("stopped", 1), ("restart", 0)]
    assert [(fault["kind"], fault["rank"]) for fault in found] == expected
    steps = [fault["step"] for fault in found]
    assert steps == sorted(set(steps))
    for number in (0, 3):
        found_after = found[number]["time"] - float((tmp_path / f"mark-{number}").read_text())
        assert found_after < 8  # a second, on an idle machine
    killed, _, stopped, left = (
        f"rank {fault['rank']} of 2 (host {HOST}, after step {fault['step']})" for fault in found
    )
    assert f"{killed} was killed by SIGKILL" in job.err
    seconds = re.search(rf"{re.escape(stopped)} has been stopped by a signal: no step in (\d+) s", job.err)
    assert seconds, job.err
    assert 5 <= int(seconds[1]) <= 10  # the launcher looks every 0.05 s
    assert f"{left} ended with exit code 0 before the run had ended\nstarting again\n" in job.err
    assert ", line " in job.err, job.err
    assert " in stop\n" in job.err, job.err
    assert " in hang\n" in job.err, job.err


ORIGIN = """
import torch
import torch.nn.functional as F
import fourfold as ff


def task():
    return ff.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda outputs, targets: (F.mse_loss(outputs[:, 0], targets[:, 0], reduction="sum"), len(targets)),
        data=lambda: ff.Data(train=ff.sql("sqlite:///rows.db", "SELECT * FROM t", key="id", target="y", index="index")),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        steps=10**6,
        batch_size=8,
    )
"""


def test_an_origin_that_is_away_is_waited_for_and_named_and_is_no_hang(start: Start, tmp_path: Path):
    (tmp_path / "origin.py").write_text(ORIGIN)
    database, away = tmp_path / "rows.db", tmp_path / "away.db"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x BLOB, y BLOB)")
        value = io.BytesIO()
        np.save(value, np.zeros(1, dtype=np.float32))
        rows = [(number, value.getvalue(), value.getvalue()) for number in range(16)]
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    job = start("train", "origin.py", "name=first", "hang_seconds=2", "restarts=0", "-n", "2")
    assert job.process.stdout
    lines = iter(job.process.stdout.readline, "")
    assert any("step       1/1000000" in line for line in lines)
    database.rename(away)  # each epoch of two steps opens it again
    assert any(re.search(r"rank [01] waits 0:\d\d for sqlite:///rows.db: unable to open", line) for line in lines)
    away.rename(database)
    assert any("/s" in line for line in lines)  # training goes on
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.err
    assert [fault["kind"] for fault in faults(tmp_path / "runs" / "first")] == ["terminated"]


FAILING = ("what=fail", "times=9", "later=0", "checkpoint_every=0", "restarts=1", "trace_every=1")


def test_a_crash_loop_ends_with_its_cause_and_leaves_its_trace(start: Start, tmp_path: Path):
    job = start("train", "script.py", "name=first", *FAILING, "-n", "2")
    assert job.end() == 1
    # Rank 1 fails; so does rank 0, if it looks for marks after that.
    first = rf"fourfold: rank [01] of 2 \(host {re.escape(HOST)}, after step 3\) failed\nTraceback"
    assert re.match(first, job.err), job.err
    assert job.err.count("RuntimeError: the disk of this rank") == 2
    run = tmp_path / "runs" / "first"
    assert [fault["kind"] for fault in faults(run)] == ["restart", "gave up"]
    assert decode_trace((run / "trace.json").read_bytes()).steps == [1, 2, 3]
    assert job.err.endswith(
        "gave up after 1 restart in a row without getting past step 3\n"
        "  look at   the error above; earlier ones are in runs/first/faults.jsonl\n"
        "  try       to fix its cause, or restarts=10 if the machine is to blame\n"
        "  then      nothing is saved, and the same command starts over\n"
    )


@pytest.mark.parametrize(("what", "left", "code"), [("exit", 0, 1), ("quit", 3, 3)])
def test_a_task_that_calls_exit_fails_the_run(train_here: TrainHere, tmp_path: Path, what: str, left: int, code: int):
    (tmp_path / "mark-0").touch()  # it is rank 0's turn
    text = train_here(f"what={what}", "times=2", code=code)
    assert (
        f"TrainingError: the task ended its process in the middle of the run, with exit code {left}\nTraceback" in text
    )
    assert f"sys.exit({left})" in text


def other_launcher(start: Start, *words: str) -> list[Job]:
    """Two ranks with the variables that another launcher would set."""
    (port,) = map(str, free_ports(1))
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start(*TRAIN, *words, **world, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def test_under_another_launcher_a_dead_rank_ends_the_others_with_the_requeue_exit_code(start: Start, tmp_path: Path):
    jobs = other_launcher(start, "what=kill", "times=1", "transport=gloo")
    assert jobs[1].end() == -signal.SIGKILL
    begin = time.monotonic()
    assert jobs[0].end() == 75
    assert time.monotonic() - begin < 20  # 0.2 s on a busy machine, and more where a disk is
    assert f"PeerError: rank 1 (host {HOST}) died while rank 0 waited for it (after step 3)" in jobs[0].err
    (fault,) = faults(tmp_path / "runs" / "first")
    assert (fault["kind"], fault["rank"], fault["host"]) == ("lost rank", 1, HOST)


ENDING = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists("ready"):
        time.sleep(0.01)
    raise RuntimeError("a reason to start again")
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
open("ready", "w").close()
while True:
    signal.pause()
"""


def test_a_signal_during_a_restart_is_obeyed(start: Start, tmp_path: Path):
    (tmp_path / "ending.py").write_text(ENDING)
    job = start("run", "-n", "2", "--restarts", "9", "ending.py")
    assert job.end() == 128 + signal.SIGINT
    assert "starting again" not in job.err


def test_the_same_command_resumes_a_job_that_was_stopped_or_killed(start, uninterrupted: Path, tmp_path: Path):
    """A rank gets SIGTERM; the launcher is killed; Ctrl-C; and the newest checkpoint is damaged."""
    words = (*TRAIN, "what=terminate+kill_launcher+interrupt", "times=3", "later=2", "-n", "2")
    run = tmp_path / "runs" / "first"
    resumed = ""
    for name, code in (("SIGTERM", 75), ("SIGKILL", -signal.SIGKILL), ("SIGINT", 130)):
        job = start(*words)
        assert job.end() == code, job.err
        assert resumed in job.out + job.err
        if name == "SIGKILL":
            resumed = "resumes from step "
            continue
        # The signal comes within a step, and is reported after it or after the next.
        message = re.escape("; run the same command again to resume there\n")
        message = rf"(?s).*fourfold: stopped by {name} after step (\d+), which is saved{message}"
        message = re.fullmatch(message, job.err)
        assert message, job.err
        step = int(message[1])
        assert (faults(run)[-1]["kind"], faults(run)[-1]["step"]) == ("terminated", step)
        assert job.err.count("fourfold: ") == (2 if name == "SIGINT" else 1), job.err
        assert (f"fourfold: {SAVING}\n" in job.err) == (name == "SIGINT"), job.err
        resumed = f"resumes from step {step} of 30"
        if not list((run / "checkpoints").glob("damaged-*")):
            resumed = damage_newest(run)
    job = start(*words)
    assert job.end() == 0, job.err
    assert resumed in job.out
    assert losses(run) == losses(uninterrupted)
    assert equal(run, uninterrupted)


def damage_newest(run: Path) -> str:
    """Flip a bit of the newest checkpoint; returns what the next job says of it."""
    newest = max((run / "checkpoints").glob("step-*"))
    piece = newest / "rank-001.safetensors"
    content = bytearray(piece.read_bytes())
    content[-1] ^= 1
    piece.write_bytes(content)
    return f"a damaged checkpoint was set aside: runs/first/checkpoints/{newest.name}/rank-001.safetensors"


def until(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


SAVING = "SIGINT: saving after this step, then ending; Ctrl-C again ends at once"


@pytest.mark.parametrize("number", ["1", "2"])
def test_a_second_ctrl_c_ends_a_step_that_hangs(start: Start, number: str, tmp_path: Path):
    (tmp_path / "mark-0").touch()  # it is rank 0's turn
    job = start(*TRAIN, "what=hang", "times=2", "-n", number)
    until(tmp_path / "mark-1")
    until(tmp_path / "runs" / "first" / "checkpoints" / "step-00000004")  # its writer may be slower than the step
    job.process.send_signal(signal.SIGINT)
    assert job.process.stderr is not None
    assert job.process.stderr.readline() == f"fourfold: {SAVING}\n"
    time.sleep(0.4)  # later than what would be a repetition
    job.process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    assert job.end() == 130
    assert time.monotonic() - begin < 20  # not the 25 s that a step may take
    ended = "; all 2 processes have ended" if number == "2" else ""
    assert job.err == f"fourfold: stopped by SIGINT{ended}; the same command resumes from step 4\n"


def test_a_step_that_hangs_after_sigterm_is_ended_by_the_time_limit(start: Start, tmp_path: Path):
    job = start(*TRAIN, "what=stick", "times=1", "-n", "2", FOURFOLD_STOP_SECONDS="1")
    until(tmp_path / "mark-0")
    until(tmp_path / "runs" / "first" / "checkpoints" / "step-00000002")
    for _ in range(2):  # as `timeout` does it: once to the process, once to the group it is in
        job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75
    message = "stopped by SIGTERM: no step, evaluation or checkpoint ended within 1 s (FOURFOLD_STOP_SECONDS)"
    assert f"fourfold: rank 1 of 2: {message}; the same command resumes from step " in job.err
    assert ", in stick\n" in job.err
    ended = "fourfold: stopped by SIGTERM; all 2 processes have ended; the same command resumes from step 2\n"
    assert job.err.endswith(ended)


def test_ctrl_c_while_ranks_start_prints_one_line(start: Start, tmp_path: Path):
    slow = 'if "RANK" in os.environ:\n    Path("ready").touch()\n    time.sleep(99)\n'
    (tmp_path / "script.py").write_text(TASK.replace("import torch\n", f"{slow}import torch\n"))
    job = start(*TRAIN, "-n", "2")
    until(tmp_path / "ready")
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130, job.out + job.err
    message = "stopped by SIGINT; all 2 processes have ended; nothing is saved, and the same command starts over"
    assert job.err == f"fourfold: {message}\n"


def test_sigterm_saves_under_another_launcher_too_and_one_rank_can_resume(start, train_here, tmp_path: Path):
    jobs = other_launcher(start, "what=terminate", "times=1")
    assert [job.end() for job in jobs] == [75, 75]
    message = "stopped by SIGTERM after step 5, which is saved; run the same command again to resume there"
    assert jobs[0].err == f"fourfold: {message}\n"
    assert jobs[1].err == ""
    assert "resumes from step 5 of 30" in train_here("what=terminate", "times=1")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "script.py").write_text(TASK)
    train_here(folder=tmp_path / "whole")
    whole = losses(tmp_path / "whole" / "runs" / "first")
    assert losses(tmp_path / "runs" / "first") == pytest.approx(whole, rel=1e-5)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "fourfold-test", str(path)]
    if (
        not shutil.which("mount")
        or os.geteuid()
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("a small tmpfs needs root and the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_run_whose_last_checkpoint_does_not_fit_on_the_disk_fails(train_here: TrainHere, tmp_path: Path):
    disk = tmp_path / "disk"
    with small_disk(disk):
        (disk / "script.py").write_text(TASK)
        (disk / "other").write_bytes(b"x" * (shutil.disk_usage(disk).free - 65536))
        text = train_here("disk_seconds=0", folder=disk, code=1)
        assert "all 30 steps are done, but the last checkpoint could not be written" in text
        (disk / "other").unlink()
        train_here(folder=disk)
        os.chdir(tmp_path)  # or the disk is in use
