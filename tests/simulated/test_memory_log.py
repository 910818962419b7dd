"""Laws of a run's memory in its log: predicted and measured, of every rank, at the steps where it may have grown."""

import functools
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.threads import ThreadCommunicator
from fourfold.torch_kit import memory
from fourfold.trainer.memory_log import predict_bytes

HIDDEN = 256


class Samples:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((HIDDEN,), index / 32), torch.zeros(HIDDEN)


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def task(data: ff.Data, optimizer: Any = ADAMW) -> ff.Task:
    return ff.Task(
        model=lambda: nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(HIDDEN, HIDDEN), nn.Tanh())]),
        loss=lambda outputs, targets: (outputs - targets).square().sum(-1),
        data=lambda: data,
        optimizer=optimizer,
        batch_size=8,
        steps=6,
    )


def memory_lines(folder: Path, **options: Any) -> list[dict[str, Any]]:
    ff.train(task(ff.Data(train=Samples(), valid=Samples())), folder=str(folder), name="run", **options)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["memory"] for line in lines if "memory" in line]


@pytest.mark.usefixtures("without_dry_run")
def test_memory_is_measured_once_it_no_longer_grows_at_evaluations_and_at_the_end(tmp_path: Path) -> None:
    lines = memory_lines(tmp_path, evaluate_every=4)
    assert [line["step"] for line in lines] == [3, 4, 6]
    (first,), (last,) = lines[0]["ranks"], lines[-1]["ranks"]
    assert 0 < first["before_bytes"] <= first["peak_bytes"] <= last["peak_bytes"]
    assert first["device_bytes"] is None


@pytest.mark.usefixtures("without_dry_run")
def test_the_prediction_is_what_the_rank_keeps(tmp_path: Path) -> None:
    gc.collect()
    before = memory.memory_use().total_bytes
    first = memory_lines(tmp_path, checkpoint_every=0)[0]
    (rank,) = first["ranks"]
    assert set(first["predicted"]) == {"weights", "states"}  # one rank: gradients stay where autograd puts them
    assert rank["kept_bytes"] - before == pytest.approx(sum(first["predicted"].values()), rel=0.05)


def noisy_sgd(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that draws a random number when it is made."""
    torch.rand(())
    return torch.optim.SGD(parameters, lr=1e-3)


def test_the_prediction_draws_no_random_numbers_that_the_training_would_miss(tmp_path: Path, monkeypatch) -> None:
    def losses(name: str) -> list[float]:
        data = ff.Data(train=Samples())
        made = task(data, noisy_sgd)
        ff.train(made, folder=str(tmp_path), name=name)
        state = torch.get_rng_state()
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [*(line["loss"] for line in lines if "samples" in line), *state.tolist()]

    with_prediction = losses("with")
    monkeypatch.setattr("fourfold.trainer.train.predict_bytes", lambda *_: None)
    assert with_prediction == losses("without")


@pytest.mark.usefixtures("without_dry_run")
@pytest.mark.parametrize("zero", [0, 2])
def test_the_prediction_is_a_rank_s_part_of_its_host(zero: int) -> None:
    made = task(ff.Data(train=Samples()))
    num_bytes = sum(parameter.nbytes for parameter in made.model().parameters())

    def body(comm: ThreadCommunicator) -> dict[str, float] | None:
        step = TrainStep(made.model(), made.loss, made.optimizer, plan=ff.Plan(dp=4, zero=zero), communicator=comm)
        return predict_bytes(made, step, made.model())

    first, *others = threads.run(4, body, hosts=2)
    assert others == [None] * 3
    assert first["states"] == pytest.approx(2 * num_bytes / (4 if zero else 1), rel=0.01)  # AdamW has two
    assert zero or first["weights"] == num_bytes
