"""Laws of a run's folder: a pipe, file or link in place of its files is reported, and never blocks the run."""

import os
import threading

import pytest

from fourfold.environment import known_waits
from fourfold.environment.known_waits import SLOT_WORDS
from fourfold.report import run_record as reported
from fourfold.trainer import fault_log
from fourfold.trainer.run_dir import RunDir, archive_run
from fourfold.trainer.run_identity import read_finished_record
from fourfold.words.errors import SettingError, TrainingError

pytestmark = pytest.mark.usefixtures("without_dry_run")

LIMIT_SECONDS = 20


def within_limit(body):
    """What `body` raises. It runs in its own thread, because a test that blocks on a pipe would never end."""
    raised = []

    def run():
        try:
            body()
            raised.append(None)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert raised, "it waits"
    return raised[0]


def opened(parent):
    return RunDir(parent, "run", run_prefix="run", identity={})


def test_a_pipe_in_place_of_a_log_is_reported_without_blocking(tmp_path):
    opened(tmp_path).close()
    run = tmp_path / "run"
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert within_limit(lambda: read_finished_record(run)) is None
    for body in (lambda: opened(tmp_path), lambda: archive_run(run)):
        error = within_limit(body)
        assert isinstance(error, TrainingError)
        assert "metrics.jsonl could not be written: is a pipe" in str(error)
    os.mkfifo(run / "faults.jsonl")
    fault = fault_log.Fault(time=0.0, kind="restart", step=1, rank=0, host="a", text="")
    for body in (lambda: fault_log.append_fault(run, fault), lambda: reported.read_faults(run)):
        error = within_limit(body)
        assert isinstance(error, OSError)
        assert "is a pipe" in str(error)


@pytest.mark.parametrize(("create", "message"), [
    (lambda path: path.touch(), "is not a folder"),
    (lambda path: path.symlink_to("/nonexistent/checkpoints"), "is a link to nothing"),
])  # fmt: skip
def test_a_file_or_broken_link_in_place_of_the_checkpoint_folder_is_refused_at_the_start(create, message, tmp_path):
    """Otherwise each save would wait a minute for files that cannot be written."""
    opened(tmp_path).close()
    create(tmp_path / "run" / "checkpoints")
    with pytest.raises(SettingError, match=f"checkpoints {message}"):
        opened(tmp_path)


def test_the_checkpoint_folder_may_be_a_link(tmp_path):
    opened(tmp_path).close()
    (tmp_path / "large").mkdir()
    link = tmp_path / "run" / "checkpoints"
    link.symlink_to(tmp_path / "large")
    opened(tmp_path).close()
    assert link.is_symlink()


def test_a_disk_that_does_not_answer_is_a_known_wait(tmp_path, monkeypatch):
    slot = memoryview(bytearray(8 * SLOT_WORDS)).cast("q")
    monkeypatch.setattr(known_waits._waits, "slot", slot)
    seen = []

    class Log:
        def __getattr__(self, name):
            return getattr(log, name)

        def write(self, text):
            seen.append(known_waits.read(slot).what)
            return log.write(text)

    run = opened(tmp_path)
    log = run._log
    monkeypatch.setattr(run, "_log", Log())
    run.append_record({"step": 1})
    run.close()
    assert seen == [f"the disk of {run.path}"]
