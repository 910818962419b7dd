"""Laws of the learning rate in a run: what the optimizer gets at each step, what is reported, what does not change."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from bench.lr_schedules import train
from fourfold.trainer.run_identity import run_identity
from fourfold.trainer.settings import make_settings
from fourfold.words.errors import SettingError
from tests.jobs import parse_job

pytestmark = pytest.mark.usefixtures("without_dry_run")


class MemoryDisplay:
    """A progress display in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, text: str) -> None:
        self.lines.append(text)

    def print_message(self, text: str) -> None:
        self.lines.append(text)

    def show_step(self, line: Any) -> None: ...
    def show_wait(self, text: str) -> None: ...

    def finish(self, text: str) -> None: ...


class Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index % 7)]), torch.tensor([float(index % 3)])


def halving(step: int, steps: int) -> float:
    return 0.5**step


TASK = ff.Task(
    model=lambda: torch.nn.Linear(1, 1),
    loss=lambda outputs, targets: (outputs - targets) ** 2,
    data=lambda: ff.Data(train=Samples()),
    optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
    batch_size=8,
    steps=6,
)


def run(folder: Path, task: ff.Task = TASK, **settings: Any) -> tuple[list[float], list[str]]:
    """The logged rate of each step, and the reported lines."""
    report = MemoryDisplay()
    result = ff.train(task, folder=str(folder), report=report, **settings)
    assert result.folder is not None
    records = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    return [record["lr"] for record in records if "lr" in record], report.lines


def test_a_run_scales_and_warms_up_its_rate_and_reports_it(tmp_path: Path) -> None:
    rates = ff.LRSchedule(scale="linear", warmup=2, schedule="linear", batch_size=8)
    got, reported = run(tmp_path, rates=rates, batch_size=32)
    assert got == pytest.approx([1e-3, 2.5e-3, 4e-3, 3e-3, 2e-3, 1e-3])
    assert reported[1] == "learning rate 0.001 × 4 (linear, batch 32, tuned for 8), 2 steps of warm-up, then linear"


@pytest.mark.parametrize(("schedule", "expected"), [(None, [1e-3] * 6), (halving, [1e-3 * 0.5**n for n in range(6)])])
def test_without_rates_the_tasks_own_schedule_is_used(schedule: Any, expected: list[float], tmp_path) -> None:
    task = dataclasses.replace(TASK, schedule=schedule)
    got, reported = run(tmp_path, task)
    assert got == expected
    assert not any("rate" in line for line in reported)
    assert "rates" not in run_identity(make_settings(task, seed=0), ff.Plan())


def test_other_rates_change_the_identity_of_a_run() -> None:
    settings = (make_settings(TASK, rates=ff.LRSchedule(warmup=warmup)) for warmup in (1, 2))
    one, other = (run_identity(each, ff.Plan()) for each in settings)
    assert one != other


def test_a_task_stays_tuned_for_its_own_batch_size_when_the_command_gives_another(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text("from tests.simulated.test_lr_schedule import TASK as task")
    monkeypatch.chdir(tmp_path)
    words = ("lr_scale=linear", "lr_warmup=2", "batch_size=32", "dp=1")
    for spec in ("mine.py", "digits"):
        job = parse_job([spec, *words])
        tuned = {"mine.py": 8, "digits": 64}[spec]
        assert (job.task.batch_size, job.task.tuned_for) == (32, tuned)
        assert job.settings["rates"] == ff.LRSchedule(scale="linear", warmup=2)


def test_warm_up_longer_than_the_run_is_refused_before_anything_is_built() -> None:
    with pytest.raises(SettingError, match="warm-up that ends before the run"):
        ff.train(TASK, rates=ff.LRSchedule(warmup=6))


def test_lr_lambda_drives_torchs_scheduler() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rates = ff.LRSchedule(schedule="step", milestones=(0.5,), scale="sqrt", batch_size=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.lr_lambda(steps=4, batch_size=8))
    got = []
    for _ in range(4):
        got.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert got == pytest.approx([0.2, 0.2, 0.02, 0.02])


@pytest.mark.parametrize("seed", [0, 1])
def test_at_eight_times_the_batch_the_scaled_rate_learns_with_warm_up_and_not_without(seed: int, tmp_path: Path):
    # Of ten seeds the worst with warm-up has loss 0.23 and accuracy 0.92, the best without it 0.59 and 0.79.
    pytest.importorskip("sklearn")
    warm, cold = (train(f"Adam, batch 512, × 8{words}", seed=seed, folder=str(tmp_path)) for words in (", warm-up", ""))
    assert warm["loss"] < 0.6 * cold["loss"]
    assert warm["accuracy"] > 0.86 > cold["accuracy"]


def test_a_run_reports_fields_without_effect(tmp_path: Path) -> None:
    _, reported = run(tmp_path, plan=ff.Plan(local_steps=4))
    assert reported[1] == 'local_steps = 4 has no effect without sync = "local"'
