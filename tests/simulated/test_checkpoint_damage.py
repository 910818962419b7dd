"""Laws of damaged and failed checkpoints: earlier ones stay valid. Ranks are threads."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.checkpoint import writer
from fourfold.checkpoint.store import CheckpointStore, newest_valid, verify_checkpoint
from fourfold.checkpoint.writer import CheckpointWriter
from fourfold.cli import checkpoint as checkpoints
from fourfold.plan.plan import Plan
from fourfold.testing import threads
from fourfold.trainer.run_identity import (
    check_run_name,
    format_finished,
    read_finished_record,
    read_identity,
    resume_hint,
)
from fourfold.words.errors import CheckpointError, SettingError, UnreadableCheckpointError
from tests.cases import Case
from tests.checkpoint_runs import ThreadRun, rewrite_manifest, save_twice
from tests.jobs import prepare_job

pytestmark = pytest.mark.usefixtures("without_dry_run")


def flip(path: Path, offset: int) -> None:
    text = bytearray(path.read_bytes())
    text[offset] ^= 1
    path.write_bytes(text)


def nested(depth: int) -> Any:
    value: Any = 0.1
    for _ in range(depth):
        value = [value]
    return value


DAMAGE = {
    "truncated": ("rank-001.safetensors", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "a flipped bit in the last byte": ("rank-001.safetensors", lambda path: flip(path, -1)),
    "a flipped bit in the header": ("rank-000.safetensors", lambda path: flip(path, 20)),
    "a missing file": ("rank-000.safetensors", Path.unlink),
    "a missing manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "a manifest nested 100,000 deep": (
        "manifest.json",
        lambda path: path.write_text('{"manifest":' * 100_000 + "1" + "}" * 100_000),
    ),
    "options nested 900 deep": (
        "manifest.json",
        lambda path: rewrite_manifest(path.parent, lambda manifest: manifest["groups"][0].update(lr=nested(900))),
    ),
    "another step than the folder's": (
        "manifest.json",
        lambda path: rewrite_manifest(path.parent, lambda manifest: manifest.update(step=4)),
    ),
    "a nominal count of 0": (
        "manifest.json",
        lambda path: rewrite_manifest(path.parent, lambda manifest: manifest["record"].update(nominal_count=0)),
    ),
    "a scale without its value": (
        "manifest.json",
        lambda path: rewrite_manifest(path.parent, lambda manifest: manifest["record"].update(scale={"good": 1})),
    ),
    "a count of updates that is a string": (
        "manifest.json",
        lambda path: rewrite_manifest(path.parent, lambda manifest: manifest["scalars"]["head.bias"].update(step="x")),
    ),
    "another step in the manifest": (
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace('"step":3', '"step":4')),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named_and_the_previous_checkpoint_is_used(damage, tmp_path, capsys):
    name, break_it = DAMAGE[damage]
    store = save_twice(tmp_path)
    break_it(store.step_dir(3) / name)
    assert any(name in text for text in verify_checkpoint(store.step_dir(3)))
    assert newest_valid(tmp_path) == store.step_dir(1)
    checkpoints.export_checkpoint(str(tmp_path), str(tmp_path / "weights"), form="safetensors", step=None, ema=False)
    assert "a newer checkpoint is damaged" in capsys.readouterr().err

    def resume(comm):
        run = ThreadRun(Case(), comm, tmp_path, token="b")
        progress = run.checkpoints.resume()
        assert progress is not None
        run.run_steps(1, 3, save_at=(3,))
        return progress.step, run.log.messages

    (step, messages), (other, _) = threads.run(2, resume)
    assert (step, other) == (1, 1)
    assert name in messages[0]
    assert CheckpointStore(tmp_path).steps() == [1, 3]
    assert not verify_checkpoint(store.step_dir(3))
    assert (store.path / "damaged-step-00000003").is_dir()


def entry_of(manifest: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    (entry,) = [each for each in manifest["tensors"] if (each["kind"], each["name"]) == (kind, name)]
    return entry


def transpose(manifest: dict[str, Any]) -> None:
    """Give a matrix another shape with as many elements."""
    entry = entry_of(manifest, "model", "first.weight")
    assert entry["shape"] == [24, 16]
    entry["shape"] = [16, 24]


DIFFERENCES = {
    "another dtype": (
        lambda manifest: entry_of(manifest, "model", "head.bias").update(dtype="I64"),
        "model.head.bias is F64 [10], I64 [10] in the manifest",
    ),
    "another shape": (transpose, "model.first.weight is F64 [24, 16], F64 [16, 24] in the manifest"),
    "another name": (
        lambda manifest: entry_of(manifest, "model", "head.bias")["parts"][0].update(name="model.x"),
        "no model.x",
    ),
    "one less": (
        lambda manifest: manifest["tensors"].remove(entry_of(manifest, "model", "head.bias")),
        "model.head.bias, which the manifest does not have there",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_file_whose_tensors_differ_from_the_manifest_is_damaged(difference, tmp_path, capsys):
    change, message = DIFFERENCES[difference]
    store = save_twice(tmp_path, 1)
    rewrite_manifest(store.step_dir(3), change)
    assert any(message in text for text in verify_checkpoint(store.step_dir(3)))
    assert newest_valid(tmp_path) == store.step_dir(1)
    assert checkpoints.verify_checkpoints(str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert f"{store.step_dir(3)}   damaged" in out
    assert f"rank-000.safetensors: {message}" in out
    assert f"{store.step_dir(1)}   good" in out


def test_a_checkpoint_copied_to_the_folder_of_another_step_is_damaged(tmp_path, capsys):
    store = save_twice(tmp_path, 1)
    shutil.copytree(store.step_dir(1), store.step_dir(5))
    assert checkpoints.verify_checkpoints(str(tmp_path)) == 1
    assert "step 1, in the folder of step 5" in capsys.readouterr().out
    assert newest_valid(tmp_path) == store.step_dir(3)


def test_a_damaged_marker_is_reported_and_older_checkpoints_are_kept(tmp_path, monkeypatch):
    def broken(path, suffix, text, real=writer.write_marker):
        real(path, suffix, b'{"file":' * 100_000 if "step-00000003" in str(path) else text)

    monkeypatch.setattr(writer, "write_marker", broken)

    def body(comm):
        run = ThreadRun(Case(), comm, tmp_path)
        run.run_steps(0, 3, save_at=(1, 3))
        return run.log.messages

    (messages,) = threads.run(1, body)
    assert "step 3 could not be written: rank-000.json: " in messages[0]
    assert CheckpointStore(tmp_path).steps() == [1]


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    "text", ['{"identity":' * 100_000, '{"identity": [[', "[]", f'{{"identity": {{"a": {DEEP}}}}}']
)
def test_unreadable_settings_give_a_run_no_identity(text, tmp_path):
    (tmp_path / "settings.json").write_text(text)
    (tmp_path / "plan.toml").write_text("a = " + "[" * 100_000)
    (tmp_path / "metrics.jsonl").write_text('{"finished": 3}\n' + text + "\n")
    assert read_identity(tmp_path) is None
    assert read_finished_record(tmp_path) is None
    (tmp_path / "empty").mkdir()
    assert resume_hint(tmp_path) == "nothing is saved, and the same command starts over"
    check_run_name(tmp_path, "empty")  # a new run takes it
    with pytest.raises(SettingError, match=r"settings\.json is not there, or not one of a run"):
        check_run_name(tmp_path.parent, tmp_path.name, {"task": "a"})
    assert "is finished (3 steps)" in format_finished(tmp_path, {"finished": 3}, Plan())


def test_a_finished_run_does_not_resume(tmp_path):
    save_twice(tmp_path, 1)
    assert resume_hint(tmp_path) == "the same command resumes from step 3"
    (tmp_path / "metrics.jsonl").write_text('{"finished": 3}\n')
    assert resume_hint(tmp_path) == "the run is finished (3 steps)"


def test_a_run_that_starts_over_may_have_the_name_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, words = tmp_path / "runs" / "q", ["digits", "steps=6"]
    run.mkdir(parents=True)
    (run / "settings.json").write_text('{"identity": {"steps": 5}}')
    with pytest.raises(SettingError, match=r"with another .*steps"):
        prepare_job([*words, "name=q"], num_processes=1)
    assert prepare_job([*words, "name=q", "fresh=true"], num_processes=1).fresh
    with pytest.raises(SettingError, match="the name of a folder"):
        prepare_job([*words, "name=..", "fresh=true"], num_processes=1)


def test_every_flipped_bit_of_a_file_is_found(tmp_path):
    store = save_twice(tmp_path, 1)
    generator = torch.Generator().manual_seed(0)
    for path in store.step_dir(3).iterdir():
        for offset in torch.randint(path.stat().st_size - 1, (40,), generator=generator).tolist():
            flip(path, offset)
            assert verify_checkpoint(store.step_dir(3)), (path, offset)
            flip(path, offset)
    assert not verify_checkpoint(store.step_dir(3))


OTHER_VERSIONS = {
    "an older version": lambda manifest: manifest.update(version=2),
    "a newer version with a field of its own": lambda manifest: manifest.update(version=4, streams=[1]),
    "a newer version of another form": lambda manifest: manifest.update(version=4, tensors=[], feed=None),
}


@pytest.mark.parametrize("change", OTHER_VERSIONS.values(), ids=OTHER_VERSIONS)
def test_a_checkpoint_of_another_version_is_not_damaged_and_the_run_does_not_restart(change, tmp_path, capsys):
    store = save_twice(tmp_path)
    for step in store.steps():
        rewrite_manifest(store.step_dir(step), change)
    with pytest.raises(UnreadableCheckpointError, match=r"version [24], of another fourfold .* version 3"):
        threads.run(2, lambda comm: ThreadRun(Case(), comm, tmp_path).checkpoints.resume())
    assert store.steps() == [1, 3]
    assert checkpoints.verify_checkpoints(str(tmp_path)) == 1
    assert checkpoints.list_checkpoints(str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "damaged" not in out
    assert out.count("cannot be read here") == 4
    with pytest.raises(UnreadableCheckpointError, match="another fourfold"):
        checkpoints.export_checkpoint(
            str(tmp_path), str(tmp_path / "weights.safetensors"), form="safetensors", step=None, ema=False
        )


@pytest.mark.parametrize("name", ["manifest.json", "rank-001.safetensors"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_file_that_cannot_be_opened_is_not_damaged(name, number, tmp_path, monkeypatch):
    store = save_twice(tmp_path)

    def refused(path, *rest, real=Path.open, **how):
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **how)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UnreadableCheckpointError, match=rf"{name}: {os.strerror(number).lower()}"):
        threads.run(2, lambda comm: ThreadRun(Case(), comm, tmp_path).checkpoints.resume())
    assert store.steps() == [1, 3]


def test_without_a_valid_checkpoint_nothing_is_restored(tmp_path):
    store = save_twice(tmp_path, 1)
    for step in (1, 3):
        flip(store.step_dir(step) / "rank-000.safetensors", -1)
    (progress,) = threads.run(1, lambda comm: ThreadRun(Case(), comm, tmp_path).checkpoints.resume())
    assert progress is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        newest_valid(tmp_path)


def test_what_the_writer_does_not_expect_ends_the_run(tmp_path, monkeypatch):
    def fails(_: object) -> bytes:
        raise RuntimeError("no fault of the disk")

    monkeypatch.setattr(writer, "encode_manifest", fails)
    with pytest.raises(RuntimeError, match="no fault of the disk"):
        save_twice(tmp_path, 1)


def test_a_failed_write_keeps_older_checkpoints(tmp_path, monkeypatch):
    def fails(path, snapshot, real=writer.write_snapshot):
        if path.name == "rank-001.safetensors" and "step-00000003" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, snapshot)

    monkeypatch.setattr(writer, "write_snapshot", fails)

    def body(comm):
        run = ThreadRun(Case(), comm, tmp_path)
        run.run_steps(0, 3, save_at=(1, 3))
        return run.log.messages

    (messages, others) = threads.run(2, body)
    assert "step 3 could not be written: rank 1: no space left on device" in messages[0]
    assert not others
    assert [path.name for path in CheckpointStore(tmp_path).path.iterdir()] == ["step-00000001"]
    assert not verify_checkpoint(CheckpointStore(tmp_path).step_dir(1))


def test_a_folder_that_cannot_be_written_is_reported_without_waiting_for_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MARKER_TIMEOUT_SECONDS", 10.0)

    def body(comm):
        run = ThreadRun(Case(), comm, tmp_path)
        run.run_steps(0, 1, save_at=(1,))
        if run.step.rank == 0:
            store = CheckpointStore(tmp_path).path
            store.rename(tmp_path / "before")
            store.touch()
        run.step.all_gather_json(None)
        run.run_steps(1, 3, save_at=(3,))
        return run.log.messages

    (messages, others) = threads.run(2, body)
    assert "step 3 could not be written: rank 0: " in messages[0]
    assert "in time" not in messages[0]
    assert not others


def test_a_folder_that_is_removed_while_it_is_written_is_reported_without_waiting_for_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MARKER_TIMEOUT_SECONDS", 10.0)
    marked, first = writer.write_marker, threading.Event()

    def mark(path, suffix, text):
        if "step-00000003" in str(path) and path.name == "rank-001":
            assert first.wait(60)
            shutil.rmtree(path.parent)
            return
        marked(path, suffix, text)
        if "step-00000003" in str(path):
            first.set()

    monkeypatch.setattr(writer, "write_marker", mark)

    def body(comm):
        run = ThreadRun(Case(), comm, tmp_path)
        run.run_steps(0, 3, save_at=(1, 3))
        return run.log.messages

    (messages, _) = threads.run(2, body)
    assert "step 3 could not be written: its folder was removed while it was written" in messages[0]
    assert [path.name for path in CheckpointStore(tmp_path).path.iterdir()] == ["step-00000001"]


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A file system of 256 KiB at `path`; skips the test where it cannot be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "fourfold-test", str(path)]
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs needs root and the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("checked", [True, False], ids=["space is checked first", "space runs out while writing"])
def test_a_full_disk_is_a_warning_and_earlier_checkpoints_are_kept(checked, tmp_path, monkeypatch):
    if not checked:
        monkeypatch.setattr(CheckpointWriter, "_check_disk_space", lambda *_: None)
    monkeypatch.setattr(writer, "SPARE_BYTES", 0)
    with small_disk(tmp_path / "disk"):
        folder = tmp_path / "disk" / "run"

        def body(comm):
            run = ThreadRun(Case(), comm, folder)
            run.run_steps(0, 1, save_at=(1,))
            if run.step.rank == 0:
                free = shutil.disk_usage(folder).free
                (tmp_path / "disk" / "other").write_bytes(b"x" * (free - 8192))
            run.step.all_gather_json(None)
            run.run_steps(1, 3, save_at=(3,))
            return run.log.messages

        messages, _ = threads.run(2, body)
        assert "could not be written" in messages[0]
        # While one rank writes its reason, the other may have filled the disk.
        reasons = ("KiB needed",) if checked else ("no space left", "nor the reason")
        assert any(reason in messages[0] for reason in reasons)
        assert [path.name for path in CheckpointStore(folder).path.iterdir()] == ["step-00000001"]
        assert not verify_checkpoint(CheckpointStore(folder).step_dir(1))


def test_an_export_creates_its_folder_or_reports_why_it_cannot(tmp_path, capsys):
    save_twice(tmp_path)
    target = tmp_path / "not" / "there" / "weights.safetensors"
    assert checkpoints.export_checkpoint(str(tmp_path), str(target), form="safetensors", step=None, ema=False) == 0
    assert target.stat().st_size > 0
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"file/weights could not be written: (not a directory|file exists)"):
        checkpoints.export_checkpoint(
            str(tmp_path), str(tmp_path / "file" / "weights"), form="safetensors", step=None, ema=False
        )
