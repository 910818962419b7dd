"""`fourfold plan`, `plan=auto`, `show`, log and report on this machine, with prices that are literal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.plan.plan import Plan
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.tasks import digits
from tests.calibration_cases import pretend_measured
from tests.spawned import SOURCE

SECONDS = 300  # the time limit of a command


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Path:
    """An empty folder, and a cache in which this machine is measured for digits on two ranks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    pretend_measured(TaskFacts(digits.task()), 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fourfold(*words: str, code: int = 0) -> str:
    """What a command prints. It must end with this exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_training_is_planned_and_resumes_with_the_plan_that_it_had(measured):
    first = fourfold("train", "digits", "plan=auto", "-n", "2", "steps=4", "checkpoint_every=2")
    lines = first.splitlines()
    assert lines[0].startswith("plan   ")
    assert "2 ranks of this machine, as measured" in lines[0]
    assert lines[1].startswith("why    against ")
    (folder,) = (measured / "runs").iterdir()
    plan = Plan.from_toml((folder / "plan.toml").read_text())
    assert plan.mesh.size == 2
    assert re.search(r"^step     predicted [\d.]+ \S+, measured [\d.]+ \S+: [+−][\d.]+ %$", first, re.MULTILINE)
    assert "One step, predicted and measured" in (folder / "report.html").read_text()
    # The run goes on from step 2, on another day: the calibration says something else by then, or nothing.
    for path in (measured / "cache").rglob("*.json"):
        path.unlink()
    log = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(log[:-1]))
    again = fourfold("train", "digits", "plan=auto", "-n", "2", "steps=4", "checkpoint_every=2")
    assert "kept from runs/" in again.splitlines()[0]
    assert Plan.from_toml((folder / "plan.toml").read_text()) == plan
    assert "predicted" not in again


def test_plans_are_shown_and_the_first_ones_run_here(measured):
    shown = fourfold("show", "digits", "dp=2")
    assert "\nprediction   " in shown
    assert "on 2 ranks of this machine, as measured" in shown
    printed = fourfold("plan", "digits", "-n", "2", "confirm=2")
    table = printed[printed.index("in turns") :]
    assert re.search(r"measured +predicted +difference +plan\n", table)
    text = (measured / "plan.toml").read_text()
    assert "# measured: " in text
    fastest = table.splitlines()[3].split("  ")[-1]
    fields = dict(word.split("=") for word in fastest.split())
    assert {name: str(getattr(Plan.from_toml(text), name)) for name in fields} == fields
    fourfold("train", "digits", "plan.toml", "steps=2", "name=planned")
    again = fourfold("plan", "planned")
    assert again.startswith("runs/planned · ")
    assert "the run's own plan" in again
