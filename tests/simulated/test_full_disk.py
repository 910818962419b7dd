"""Laws of runs on a full disk: training continues, and what cannot be written now is written later."""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.checkpoint import writer
from fourfold.checkpoint.export import export_weights
from fourfold.checkpoint.manager import TrainingProgress
from fourfold.checkpoint.store import newest_valid
from fourfold.feed.source import TensorSource
from fourfold.launcher.hang_detector import HeartbeatFile
from fourfold.plan.checkpoint_boxes import shard_file_name
from fourfold.testing import threads
from fourfold.trace.trace_file import decode_trace
from fourfold.trainer import loop
from fourfold.trainer.heartbeat import DONE, HEARTBEAT_VARIABLE, PAUSED
from fourfold.trainer.run_dir import RunDir
from fourfold.words.errors import SettingError, StoppedError, TrainingError
from tests.cases import Case
from tests.checkpoint_runs import ThreadRun

OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
FULL = OSError(errno.ENOSPC, "No space left on device")


class Disk:
    """A log file on a disk with `room` free bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, text: bytes) -> int:
        if not self.room:
            raise FULL
        taken = self._file.write(text[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class MemoryDisplay:
    """A progress display in memory."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.beginning = self.ending = ""

    def start(self, text: str) -> None:
        self.beginning = text

    def show_step(self, line: Any) -> None: ...
    def show_wait(self, text: str) -> None: ...

    def print_message(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, text: str) -> None:
        self.ending = text


def train(folder: Path, *, optimizer: str = "sgd", **given: Any) -> MemoryDisplay:
    torch.manual_seed(1)
    data = TensorSource(torch.randn(16, 4), torch.randn(16, 2))
    task = ff.Task(
        model=lambda: nn.Linear(4, 2),
        loss=lambda outputs, targets: (outputs - targets).square(),
        data=lambda: ff.Data(train=data),
        optimizer=lambda parameters: OPTIMIZERS[optimizer](parameters, lr=0.1),
    )
    display = MemoryDisplay()
    options: dict[str, Any] = {"steps": 6, "batch_size": 4, "trace_every": 0, **given}
    ff.train(task, folder=str(folder), name="run", report=display, **options)
    return display


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("room", [0, 1, 13, 14, 20])
def test_log_lines_that_a_full_disk_rejects_are_written_later(room, tmp_path):
    folder = RunDir(tmp_path, "run", run_prefix="run", identity={})
    disk = folder._log = Disk(folder._log, room)  # type: ignore[assignment]
    unwritten = [folder.append_record({"number": number}) is not None for number in range(3)]
    assert unwritten == [room < 13 * (number + 1) for number in range(3)]
    position = folder.log_bytes()
    folder.append_record({"number": 3})
    disk.room = 10**6
    folder.sync()
    assert [line["number"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]
    folder.truncate_log(position)
    assert [line["number"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    folder.close()


def test_a_removed_run_folder_is_restored_with_the_next_checkpoint(tmp_path):
    folder = RunDir(tmp_path, "run", run_prefix="run", identity={"task": "a"})
    folder.write_plan_and_settings(ff.Plan(dp=2), {"steps": 3})
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("settings.json", "plan.toml")}
    folder.append_record({"number": 0})
    shutil.rmtree(tmp_path / "run")
    folder.append_record({"number": 1})
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    folder.sync()
    folder.append_record({"number": 2})
    assert [line["number"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    with pytest.raises(SettingError, match="is being trained by another process"):
        RunDir(tmp_path, "run", run_prefix="run", identity={"task": "a"})
    folder.close()
    RunDir(tmp_path, "run", run_prefix="run", identity={"task": "a"}).close()


def test_a_run_folder_taken_over_by_another_run_is_not_touched(tmp_path):
    folder = RunDir(tmp_path, "run", run_prefix="run", identity={"task": "a"})
    folder.write_plan_and_settings(ff.Plan(), {})
    shutil.rmtree(tmp_path / "run")
    theirs = RunDir(tmp_path, "run", run_prefix="run", identity={"task": "b"})
    with pytest.raises(OSError, match="run is another run's now"):
        folder.sync()
    theirs.append_record({"number": 7})
    theirs.close()
    assert [line["number"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [7]
    folder.close()


def test_a_log_replaced_by_an_editor_is_not_taken_for_another_run(tmp_path):
    folder = RunDir(tmp_path, "run", run_prefix="run", identity={})
    folder.append_record({"number": 0})
    path = tmp_path / "run" / "metrics.jsonl"
    (tmp_path / "edited").write_bytes(path.read_bytes())
    (tmp_path / "edited").rename(path)
    folder.sync()
    folder.append_record({"number": 1})
    assert [line["number"] for line in lines(path)] == [0]  # lines go to the open file, which is no longer at this path
    folder.close()


def test_unwritten_lines_are_dropped_with_the_steps_that_are_repeated(tmp_path):
    folder = RunDir(tmp_path, "run", run_prefix="run", identity={})
    disk = folder._log = Disk(folder._log, 13)  # type: ignore[assignment]
    folder.append_record({"number": 0})
    position = folder.log_bytes()
    folder.append_record({"number": 1})
    folder.truncate_log(position)
    disk.room = 10**6
    folder.append_record({"number": 2})
    assert [line["number"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 2]
    folder.close()


def test_training_continues_when_the_log_cannot_be_written(tmp_path, monkeypatch):
    calls = iter(range(1000))

    def write(folder: RunDir, real=RunDir._flush) -> None:
        if 1 <= next(calls) < 4:
            raise FULL
        real(folder)

    monkeypatch.setattr(RunDir, "_flush", write)
    display = train(tmp_path, checkpoint_every=0)
    assert display.beginning == "run · 10 parameters · 1 process · one rank, nothing to exchange"
    assert [note.partition(":")[0] for note in display.notes] == ["warning"]
    assert "metrics.jsonl could not be written: no space left on device" in display.notes[0]
    written = [each for each in lines(tmp_path / "run" / "metrics.jsonl") if not {"memory", "data"} & each.keys()]
    assert [line.get("step") for line in written] == [*range(1, 7), None]


def test_a_trace_that_a_full_disk_rejects_warns_once_and_is_written_with_the_next_step(tmp_path, monkeypatch):
    def write(path: Path, content: bytes, real=Path.write_bytes) -> int:
        if path.name == "trace.json.part" and next(calls) < 2:
            real(path, content[:9])
            raise FULL
        return real(path, content)

    calls = iter(range(1000))
    monkeypatch.setattr(Path, "write_bytes", write)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        display = train(tmp_path, checkpoint_every=0, trace_every=1)
    reason = "trace.json could not be written: no space left on device"
    assert display.notes == [f"warning: {reason}; its steps are kept; training continues"]
    assert decode_trace((tmp_path / "run" / "trace.json").read_bytes()).steps == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "run" / "trace.json.part").exists()


def test_a_trace_that_no_later_step_writes_again_is_written_at_the_end(tmp_path, monkeypatch):
    """Steps 3 and 4 are sampled, and no later one."""

    def write(path: Path, content: bytes, real=Path.write_bytes) -> int:
        if path.name == "trace.json.part" and next(calls) < 2:
            raise FULL
        return real(path, content)

    calls = iter(range(1000))
    monkeypatch.setattr(Path, "write_bytes", write)
    train(tmp_path, checkpoint_every=0, trace_every=100)
    assert decode_trace((tmp_path / "run" / "trace.json").read_bytes()).steps == [3, 4]


def test_a_run_is_finished_only_when_its_last_checkpoint_is_written(tmp_path, monkeypatch):
    def fails(path, snapshot, real=writer.write_snapshot):
        if "step-00000006" in str(path):
            raise FULL
        return real(path, snapshot)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_snapshot", fails)
        with pytest.raises(TrainingError, match=r"the last checkpoint could not be written.*resumes from step 4"):
            train(tmp_path, checkpoint_every=4, disk_seconds=0)
    display = train(tmp_path, checkpoint_every=4)
    assert display.notes == [f"{tmp_path / 'run'} resumes from step 4 of 6"]
    assert "for 2 steps" in display.ending
    assert newest_valid(tmp_path / "run").name == "step-00000006"


class SmallDisk:
    """`write_snapshot` on a disk that has room for files below a size from some attempt on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusals: int, room: int = 0) -> None:
        self.refusals, self.room, self._real = refusals, room, writer.write_snapshot
        monkeypatch.setattr(writer, "write_snapshot", self.write)
        monkeypatch.setattr(loop, "RETRY_SECONDS", 0.001)

    def write(self, path: Path, snapshot: Any) -> Any:
        if self.refusals > 0 and snapshot.num_bytes > self.room:
            self.refusals -= 1
            raise FULL
        return self._real(path, snapshot)


def test_a_finished_run_waits_for_room_for_its_last_checkpoint(tmp_path, monkeypatch):
    SmallDisk(monkeypatch, refusals=5)
    display = train(tmp_path, optimizer="adam")
    (held, written) = display.notes
    assert "the checkpoint of step 6 could not be written: rank 0: no space left on device; the result of " in held
    assert re.search(r"the result of \d+ B is held in memory, .* waiting up to 600 s \(disk_seconds\)", held)
    assert written == "the checkpoint of step 6 is written"
    assert newest_valid(tmp_path / "run").name == "step-00000006"
    assert "finished" in lines(tmp_path / "run" / "metrics.jsonl")[-1]


def test_a_finished_run_saves_its_weights_alone_where_the_rest_has_no_room(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        SmallDisk(patch, refusals=10**9, room=400)
        with pytest.raises(TrainingError, match=r"try fourfold checkpoint export .*/weights, which") as caught:
            train(tmp_path, optimizer="adam", disk_seconds=0, checkpoint_every=4)
    got = "all 6 steps are done, but the last checkpoint could not be written: rank 0: no space left on device"
    assert got in str(caught.value)
    assert "or the same command, which starts over" in str(caught.value)
    alone, whole = tmp_path / "alone.safetensors", tmp_path / "whole.safetensors"
    export_weights(newest_valid(tmp_path / "run" / "weights"), alone)
    train(tmp_path, optimizer="adam", checkpoint_every=4)
    export_weights(newest_valid(tmp_path / "run"), whole)
    assert alone.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "run" / "weights").exists()


def test_a_finished_run_without_room_for_anything_says_so(tmp_path, monkeypatch):
    SmallDisk(monkeypatch, refusals=10**9)
    with pytest.raises(
        TrainingError, match=r"nor could the weights alone: .*no space left .*the same command, which starts"
    ):
        train(tmp_path, disk_seconds=0)
    assert not list((tmp_path / "run").rglob("*step-*"))
    assert not (tmp_path / "run" / "weights").exists()


@pytest.mark.parametrize(("room", "has_weights"), [(0, False), (400, True)])
def test_a_stop_signal_ends_the_wait_for_room(tmp_path, monkeypatch, room, has_weights):
    disk = SmallDisk(monkeypatch, refusals=10**9, room=room)

    def write(path: Path, snapshot: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return disk.write(path, snapshot)

    monkeypatch.setattr(writer, "write_snapshot", write)
    weights = f"the weights alone are saved, for fourfold checkpoint export {tmp_path / 'run' / 'weights'}"
    saved = weights if has_weights else "nothing is saved"
    with pytest.raises(
        StoppedError, match=f"stopped by SIGTERM after step 6; {re.escape(saved)}, and the same command"
    ):
        train(tmp_path, optimizer="adam")
    assert (tmp_path / "run" / "weights").exists() == has_weights


def test_a_launcher_sees_that_a_finished_run_still_saves_and_waits_for_room(tmp_path, monkeypatch):
    """Or it would kill the ranks in the middle of it, three seconds after a SIGTERM."""
    disk, heartbeats, seen = SmallDisk(monkeypatch, refusals=1), HeartbeatFile(tmp_path, 1), []
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(heartbeats.path))
    monkeypatch.setenv("LOCAL_RANK", "0")

    def write(path: Path, snapshot: Any) -> Any:
        seen.append(heartbeats.read()[0].phase)
        return disk.write(path, snapshot)

    def sleep(seconds: float) -> None:
        seen.append(heartbeats.read()[0].wait.what)

    monkeypatch.setattr(writer, "write_snapshot", write)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    train(tmp_path)
    assert seen == [PAUSED, "room on the disk", PAUSED]
    assert heartbeats.read()[0].phase == DONE


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_hold_and_save_their_result_together(zero, tmp_path, monkeypatch):
    """Rank 1's file is refused; the weights alone are those of an undisturbed save."""
    SmallDisk(monkeypatch, refusals=0)

    def write(path: Path, snapshot: Any, real: Any = writer.write_snapshot) -> Any:
        folders[path.name].append(path.parent)
        if path.name == shard_file_name(1) and "weights" not in str(path) and len(refused) < 3:
            refused.append(1)
            raise FULL
        return real(path, snapshot)

    refused: list[int] = []
    folders: dict[str, list[Path]] = {shard_file_name(rank): [] for rank in range(2)}
    monkeypatch.setattr(writer, "write_snapshot", write)

    def body(comm: Any) -> tuple[bool, str]:
        run = ThreadRun(Case(zero=zero), comm, tmp_path)
        run.run_steps(0, 2)
        run.checkpoints.save(TrainingProgress(2))
        parts = {"state": SimpleNamespace(step=run.step), "settings": SimpleNamespace(disk_seconds=600)}
        held: Any = SimpleNamespace(checkpoints=run.checkpoints, logger=run.log, stop_signal=lambda: 0, **parts)
        is_saved = loop.TrainingLoop.wait_until_saved(held, 2)
        run.step.all_gather_json(None)  # each rank has removed an earlier attempt's weights
        return is_saved, run.checkpoints.save_weights(TrainingProgress(2))[1]

    assert threads.run(2, body) == [(True, "")] * 2
    # A rank may leave its marker where rank 0 has removed all: in the next attempt it would vouch for no file.
    first, second = folders.values()
    assert first == second
    assert len(set(first)) == len(first) == 5
    assert not list(tmp_path.rglob(".part-*"))
    for name, folder in (("whole", tmp_path), ("alone", tmp_path / "weights")):
        export_weights(newest_valid(folder), tmp_path / name)
    assert (tmp_path / "alone").read_bytes() == (tmp_path / "whole").read_bytes()


def test_the_room_that_a_quicker_rank_has_filled_with_its_file_is_not_asked_for_again(tmp_path, monkeypatch):
    """The disk has room for the files of both ranks. Rank 0 looks at it when that of rank 1 is written."""
    is_written, rooms = threading.Event(), []

    def write(path: Path, snapshot: Any, real: Any = writer.write_snapshot) -> Any:
        entry = real(path, snapshot)
        if path.name == shard_file_name(1):
            is_written.set()
        return entry

    def check(self: Any, request: Any, real: Any = writer.CheckpointWriter._check_disk_space) -> None:
        assert request.manifest is None or is_written.wait(30)
        real(self, request)

    def num_bytes() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))

    def disk_usage(_: Path) -> Any:
        return SimpleNamespace(free=(rooms[0] if rooms else 10**9) - num_bytes())

    monkeypatch.setattr(writer, "write_snapshot", write)
    monkeypatch.setattr(writer.CheckpointWriter, "_check_disk_space", check)
    monkeypatch.setattr(writer, "shutil", SimpleNamespace(disk_usage=disk_usage, rmtree=shutil.rmtree))

    def body(comm: Any) -> str:
        run = ThreadRun(Case(model="digits"), comm, tmp_path)
        run.run_steps(0, 2)
        run.checkpoints.save(TrainingProgress(2))
        run.checkpoints.wait()
        run.step.all_gather_json(None)  # rank 0 has written all
        if comm.rank == 0:
            is_written.clear()
            rooms.append(2 * num_bytes() + writer.SPARE_BYTES)
        run.step.all_gather_json(None)
        run.checkpoints.save(TrainingProgress(3))
        run.checkpoints.wait_for_writer()
        return "".join(problem.got for problem in run.checkpoints.take_failures())

    assert threads.run(2, body) == ["", ""]


@pytest.mark.parametrize("resumed", [False, True], ids=["new run", "resumed run"])
def test_a_run_that_starts_on_a_full_disk_names_the_file_and_changes_nothing(resumed, tmp_path, monkeypatch):
    if resumed:
        monkeypatch.setattr(writer, "write_snapshot", refuse)
        with pytest.raises(TrainingError, match="could not be written"):
            train(tmp_path, disk_seconds=0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(Path, "write_bytes", refuse)
    name = "plan.toml" if resumed else "settings.json"
    with pytest.raises(TrainingError, match=rf"{name} could not be written: no space left .*need room .*try the same"):
        train(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert resumed or not list(tmp_path.iterdir())


def refuse(*_: Any) -> None:
    raise FULL
