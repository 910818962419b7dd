"""A task's arguments in a run's folder: settings.json has them, and config.toml is written from the same values."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import fourfold as ff
from fourfold.cli.arguments import SETTINGS
from fourfold.cli.job import Job
from fourfold.cli.settings_file import NEVER_RESOLVED
from fourfold.report.run_record import read_run
from tests.jobs import parse_job

TASK = """
import torch
import fourfold as ff


def task(*, width: int = 4, lr: float = 0.1, betas: tuple = (0.9, 0.99), seed: int = 5, made=1j):
    return ff.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda outputs, targets: (outputs - targets) ** 2,
        data=lambda: ff.Data(train=[(torch.zeros(4), torch.zeros(1))] * 8),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        steps=2,
        batch_size=8,
    )
"""
WORDS = ["mine.py", "lr=0.25", "betas=0.5,1", "seed=7", "dp=1"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TASK)
    return parse_job(WORDS)


def train(job: Job) -> Path:
    ff.train(job.task, job.plan, quiet=True, **job.settings)
    return job.run_dir


def arguments_of(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task's arguments: all in settings.json, and those given in config.toml."""
    given = tomllib.loads((run_dir / "config.toml").read_text())["task"]
    del given["name"]
    return json.loads((run_dir / "settings.json").read_text())["task_arguments"], given


def make_unfinished(run_dir: Path) -> None:
    *lines, last = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert b"finished" in last
    (run_dir / "metrics.jsonl").write_bytes(b"".join(lines))


def test_both_files_of_a_run_have_the_same_arguments_and_those_given_alone_are_its_identity(job: Job) -> None:
    recorded, given = arguments_of(train(job))
    assert given == {"lr": 0.25, "betas": [0.5, 1], "seed": 7}
    assert recorded == {"width": 4, "made": "1j", **given}
    assert json.loads(json.dumps(job.identity))["settings"] == given


FAILS: dict[str, Any] = {
    **dict.fromkeys(("schedule", "evaluate", "sample"), lambda: None),  # called with arguments
    "scheduler": lambda optimizer: CosineAnnealingLR(optimizer, T_max=0),
}


@pytest.mark.parametrize("field", FAILS)
def test_a_function_of_the_task_that_fails_outside_its_own_lines_is_named(job: Job, field: str) -> None:
    data = [(torch.zeros(4), torch.zeros(1))] * 8
    task = dataclasses.replace(job.task, data=lambda: ff.Data(train=data, valid=data), **{field: FAILS[field]})
    with pytest.raises((TypeError, ZeroDivisionError)) as caught:
        ff.train(task, job.plan, quiet=True, **job.settings)
    assert any(note.startswith(f"  in the task's {field}, ") for note in caught.value.__notes__)


def test_an_argument_with_the_name_of_a_setting_does_not_hide_it(job: Job) -> None:
    sections = read_run(train(job)).sections
    assert (sections["settings"]["seed"], sections["task"]["seed"]) == (0, 7)
    assert "lr" not in sections["settings"]


def test_a_config_that_was_edited_is_not_read_and_is_written_anew_when_the_run_resumes(job: Job) -> None:
    run_dir = train(job)
    before = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").write_text(before.replace("lr = 0.25", "lr = 0.5"))
    assert read_run(run_dir).sections["task"]["lr"] == 0.25
    make_unfinished(run_dir)
    assert train(job) == run_dir
    assert (run_dir / "config.toml").read_text() == before


def test_the_settings_and_callbacks_of_a_run_stand_in_its_settings_and_its_report(job: Job) -> None:
    settings = {**job.settings, "ema": 0.9, "evaluate_every": 1}
    ff.train(job.task, job.plan, quiet=True, callbacks=[ff.Callback(), ff.Callback()], **settings)
    recorded = json.loads((job.run_dir / "settings.json").read_text())
    words = {*SETTINGS} - {*NEVER_RESOLVED}  # every row of the table in docs/runs.md but `fresh`
    assert set(recorded) >= words
    assert (recorded["restarts"], recorded["lr_warmup"], recorded["tensor"]) == (3, 0, {})
    assert (recorded["ema"], recorded["evaluate_every"]) == (0.9, 1)
    assert recorded["callbacks"] == ["Callback", "Callback 2"]
    shown = read_run(job.run_dir).sections["settings"]
    assert {"callbacks", *words} <= shown.keys()
    assert recorded.items() >= shown.items()


def test_the_options_of_callbacks_and_the_settings_of_the_launch_stand_there_too(job: Job) -> None:
    given = parse_job([*WORDS, "callback=csv,early_stopping", "early_stopping.patience=7", "evaluate_every=1",
                       "hang_seconds=none", "lr_schedule=cosine"])  # fmt: skip
    recorded = json.loads((train(given) / "settings.json").read_text())
    assert (recorded["callback"], recorded["early_stopping.patience"]) == ("csv,early_stopping", "7")
    assert (recorded["hang_seconds"], recorded["lr_schedule"], recorded["lr_floor"]) == (None, "cosine", 0)
