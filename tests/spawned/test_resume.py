"""The same command goes on: after a kill at any moment of a save, bit for bit, and on another number of ranks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from fourfold.cli import main

SECONDS = 300  # the time limit of a command; most take four on an idle machine
SOURCE = Path(__file__).parents[2] / "src"
SMALL = ("width=32", "layers=1", "length=16", "valid_bytes=512", "batch_size=4", "ema=0.9")
TRAIN = ("train", "lm", *SMALL, "steps=6", "checkpoint_every=2")

# Kills its own process at one moment of saving step 4.
DYING = """
import os, signal, sys
from fourfold.checkpoint import manager, store


def die_in(owner, name, after=False):
    real = getattr(owner, name)

    def act(*args, **kwargs):
        four = any("step-00000004" in str(each) for each in args)
        if four and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if four:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, act)


def half(path, snapshot, real=manager.write_snapshot):
    if "step-00000004" not in str(path):
        return real(path, snapshot)
    path.write_bytes(snapshot.header)
    os.kill(os.getpid(), signal.SIGKILL)


moment = sys.argv[1]
if moment == "half a piece":
    manager.write_snapshot = half
elif moment == "no manifest":
    die_in(manager, "wait_for_marker", after=True)
elif moment == "not renamed":
    die_in(store.CheckpointStore, "commit")
else:
    die_in(store.CheckpointStore, "commit", after=True)
from fourfold.cli import main
main(sys.argv[2:])
"""


def start(folder: Path, *words: str, moment: str = "") -> subprocess.Popen[str]:
    """`fourfold WORDS` in a folder; with a moment, one that kills itself then."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    how = ["-c", DYING, moment] if moment else ["-m", "fourfold"]
    pipe = subprocess.PIPE
    command = [sys.executable, *how, *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def end(process: subprocess.Popen[str], *, code: int = 0) -> str:
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            kill(process)
    assert process.returncode == code, err
    return out


def kill(process: subprocess.Popen[str]) -> None:
    """The launcher and its ranks, by their numbers."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):  # The kernel ends them with their launcher.
            rank.kill()
    process.communicate()
    psutil.wait_procs(ranks, timeout=60)


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {name: tensor for path in sorted(newest.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    steps = [line for line in log(run) if "lr" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def equal(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    end(start(folder, *TRAIN, "-n", "1"))
    return run_of(folder)


@pytest.mark.parametrize(
    ("moment", "step"), [("half a piece", 2), ("no manifest", 2), ("not renamed", 2), ("renamed", 4)]
)
def test_a_run_killed_while_saving_goes_on_as_if_it_had_not_been(whole, moment, step, tmp_path):
    end(start(tmp_path, *TRAIN, "-n", "1", moment=moment), code=-signal.SIGKILL)
    out = end(start(tmp_path, *TRAIN, "-n", "1"))
    run = run_of(tmp_path)
    assert f"goes on from step {step} of 6" in out
    assert equal(run, whole)
    assert losses(run) == losses(whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_another_number_of_ranks_goes_on_with_the_same_samples(whole, tmp_path):
    end(start(tmp_path, *TRAIN, "-n", "1", moment="not renamed"), code=-signal.SIGKILL)
    out = end(start(tmp_path, *TRAIN, "-n", "2"))
    assert "goes on from step 2 of 6" in out
    assert losses(run_of(tmp_path)) == pytest.approx(losses(whole), rel=1e-5)


def test_a_job_of_two_killed_in_the_middle_goes_on_bit_for_bit(tmp_path):
    command = ("train", "lm", *SMALL, "steps=400", "checkpoint_every=1", "-n", "2")
    end(start(tmp_path / "whole", *command))
    process = start(tmp_path / "killed", *command)
    assert process.stdout is not None
    steps = (line for line in process.stdout if line.startswith("step "))
    next(steps)
    said = next(steps, "")  # two seconds later; something is being saved at any time
    kill(process)
    assert "/400" in said, "the run ended before it could be killed"
    out = end(start(tmp_path / "killed", *command))
    assert "goes on from step" in out
    killed, undisturbed = run_of(tmp_path / "killed"), run_of(tmp_path / "whole")
    assert equal(killed, undisturbed)
    assert losses(killed) == losses(undisturbed)


Said = Callable[..., str]


@pytest.fixture
def said(whole: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Said:
    """What a command says, run in this process beside the undisturbed run."""
    monkeypatch.chdir(whole.parents[1])

    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capfd.readouterr()
        assert ended.value.code == code, err
        return out + err

    return run


def test_a_finished_run_says_so(whole, said):
    before = log(whole)
    text = said(*TRAIN, "-n", "1")
    assert f"runs/{whole.name} is finished (6 steps): fourfold train … name=another" in text
    text = said(*TRAIN, "-n", "2", "zero=1", "bucket_bytes=4096")
    assert (
        "is finished (6 steps; it had dp = 1, zero = 0, bucket_bytes = 4194304, the same training): fourfold train"
        in text
    )
    assert log(whole) == before


def test_a_name_of_another_run_is_refused_and_told_in_what_it_differs(whole, said):
    text = said(*TRAIN, "seed=1", f"name={whole.name}", code=2)
    assert f"runs/{whole.name} is there already, with another seed (0 there, 1 here)" in text


def test_checkpoints_are_listed_verified_and_exported(whole, said, tmp_path):
    rows = said("checkpoint", "list", whole.name).splitlines()
    assert [row.split()[0] for row in rows] == ["step", "4", "6"]
    assert rows[2].endswith("best")
    assert said("checkpoint", "verify", whole.name).count("good") == 2

    file = tmp_path / "weights.safetensors"
    said("checkpoint", "export", whole.name, str(file), "--ema")
    saved = weights(whole)
    exported = load_file(file)
    assert {f"ema.{name}" for name in exported} == {name for name in saved if name.startswith("ema.")}
    assert all(torch.equal(value, saved[f"ema.{name}"]) for name, value in exported.items())
    assert "exists already" in said("checkpoint", "export", whole.name, str(file), code=2)
    assert "need one of 4, 6" in said("checkpoint", "export", whole.name, "--step", "5", code=2)
    assert "no such file" in said("train", "lm", "init=nothing.safetensors", "-n", "1", code=2)
    assert "embedding.weight of shape" in said("train", "lm", f"init={file}", "-n", "1", code=2)

    piece = whole / "checkpoints" / "step-00000006" / "rank-000.safetensors"
    good = piece.read_bytes()
    piece.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert str(Path("step-00000006") / piece.name) in said("checkpoint", "verify", whole.name, code=1)
    piece.write_bytes(good)


def test_a_run_starts_over_and_begins_with_given_weights(whole, said, tmp_path):
    file = tmp_path / "weights.safetensors"
    said("checkpoint", "export", whole.name, str(file))
    (tmp_path / "other").mkdir()
    words = (*TRAIN, f"init={file}", "name=begun", "-n", "1")
    end(start(tmp_path, *words))
    first = log(tmp_path / "runs" / "begun")[0]["loss"]
    assert first < 0.9 * losses(whole)[0]
    out = end(start(tmp_path, *words, "fresh=true"))
    assert "what was there is now runs/begun-before-1" in out
    assert log(tmp_path / "runs" / "begun")[0]["loss"] == first
    assert "finished" in log(tmp_path / "runs" / "begun-before-1")[-1]
