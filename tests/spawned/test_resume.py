"""The same command resumes, bit for bit, after a kill at any moment of a save; what it refuses; its checkpoints."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fourfold.cli import main
from tests.spawned import SOURCE

SECONDS = 300  # the time limit of a command
SMALL = ("width=32", "layers=1", "length=16", "valid_bytes=512", "batch_size=4", "ema=0.9")
TRAIN = ("train", "lm", *SMALL, "steps=6", "checkpoint_every=2")

# For each moment: kills a fork of this process at that moment of saving step 4. Forks, because one import is enough.
DYING = """
import json, os, signal, sys
import fourfold.cli.job, fourfold.tasks.lm, fourfold.trainer.train
from fourfold.checkpoint import store, writer
from fourfold.cli import main
from tests.spawned import SOURCE


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


def half(path, snapshot, real=writer.write_snapshot):
    if "step-00000004" not in str(path):
        return real(path, snapshot)
    path.write_bytes(snapshot.header)
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(moment):
    if moment == "half a piece":
        writer.write_snapshot = half
    elif moment == "no manifest":
        die_in(writer, "wait_for_marker", after=True)
    elif moment == "not renamed":
        die_in(store.CheckpointStore, "commit")
    else:
        die_in(store.CheckpointStore, "commit", after=True)


for moment, folder in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.chdir(folder)
        arrange(moment)
        main(sys.argv[2:])
    _, status = os.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
"""
# What is killed, and the step from which the same command goes on.
MOMENTS = {"half a piece": 2, "no manifest": 2, "not renamed": 2, "renamed": 4}


def kill_while_saving(folders: dict[str, str], *words: str) -> None:
    """`fourfold WORDS` in each folder, killed at its moment."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DYING, json.dumps(folders), *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The uninterrupted run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that are killed
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder), pytest.raises(SystemExit, match=r"^0$"):
        main([*TRAIN, "-n", "1"])
    yield run_of(folder)
    torch.set_num_threads(threads)


Run = Callable[..., str]


@pytest.fixture
def run(whole: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process and returns what it prints, in the folder of the uninterrupted run or another."""

    def command(*words: str, code: int = 0, folder: Path = whole.parents[1]) -> str:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capfd.readouterr()
        assert ended.value.code == code, err
        return out + err

    return command


def test_a_run_killed_while_saving_resumes_as_if_uninterrupted(whole, run, tmp_path):
    folders = {moment: tmp_path / moment for moment in MOMENTS}
    for folder in folders.values():
        folder.mkdir()
    kill_while_saving({moment: str(folder) for moment, folder in folders.items()}, *TRAIN, "-n", "1")
    for moment, step in MOMENTS.items():
        out = run(*TRAIN, "-n", "1", folder=folders[moment])
        resumed = run_of(folders[moment])
        assert f"resumes from step {step} of 6" in out, moment
        assert equal(resumed, whole), moment
        assert losses(resumed) == losses(whole), moment
        left = sorted(path.name for path in (resumed / "checkpoints").iterdir())
        assert left == ["step-00000004", "step-00000006"], moment


def test_a_finished_run_says_so(whole, run):
    before = log(whole)
    text = run(*TRAIN, "-n", "1")
    assert f"runs/{whole.name} is finished (6 steps): fourfold train … name=another" in text
    text = run(*TRAIN, "-n", "2", "zero=1", "bucket_bytes=4096")
    assert (
        "is finished (6 steps; it had dp = 1, zero = 0, bucket_bytes = 4194304, the same training): fourfold train"
        in text
    )
    assert log(whole) == before


def test_the_name_of_another_run_is_refused_with_the_differences(whole, run):
    text = run(*TRAIN, "seed=1", f"name={whole.name}", code=2)
    assert f"runs/{whole.name} exists already, with another seed (0 there, 1 here)" in text


def test_checkpoints_are_listed_verified_and_exported(whole, run, tmp_path):
    rows = run("checkpoint", "list", whole.name).splitlines()
    assert [row.split()[0] for row in rows] == ["step", "4", "6"]
    assert rows[2].endswith("best")
    assert run("checkpoint", "verify", whole.name).count("good") == 2

    file = tmp_path / "weights.safetensors"
    run("checkpoint", "export", whole.name, str(file), "--ema")
    saved = weights(whole)
    exported = load_file(file)
    assert {f"ema.{name}" for name in exported} == {name for name in saved if name.startswith("ema.")}
    assert all(torch.equal(value, saved[f"ema.{name}"]) for name, value in exported.items())
    assert "exists already" in run("checkpoint", "export", whole.name, str(file), code=2)
    assert "need one of 4, 6" in run("checkpoint", "export", whole.name, "--step", "5", code=2)
    assert "no such file" in run("train", "lm", "init=nothing.safetensors", "-n", "1", code=2)
    assert "embedding.weight of shape" in run("train", "lm", f"init={file}", "-n", "1", code=2)

    piece = whole / "checkpoints" / "step-00000006" / "rank-000.safetensors"
    good = piece.read_bytes()
    piece.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert str(Path("step-00000006") / piece.name) in run("checkpoint", "verify", whole.name, code=1)
    piece.write_bytes(good)


def test_a_run_starts_over_and_begins_with_given_weights(whole, run, tmp_path):
    file = tmp_path / "weights.safetensors"
    run("checkpoint", "export", whole.name, str(file))
    words = (*TRAIN, f"init={file}", "name=begun", "-n", "1")
    run(*words, folder=tmp_path)
    first = log(tmp_path / "runs" / "begun")[0]["loss"]
    assert first < 0.9 * losses(whole)[0]
    out = run(*words, "fresh=true", folder=tmp_path)
    assert "the earlier run is now runs/begun-before-1" in out
    assert log(tmp_path / "runs" / "begun")[0]["loss"] == first
    assert "finished" in log(tmp_path / "runs" / "begun-before-1")[-1]
