"""Laws of steps whose loss or gradient is not finite. Ranks are threads."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.checkpoint.restore import CheckpointReader
from fourfold.checkpoint.store import newest_valid
from fourfold.feed.batches import Batch
from fourfold.feed.source import TensorSource
from fourfold.optim.ema import EMA
from fourfold.orders.sample_order import BatchRange, rows, shard_range
from fourfold.plan.checkpoint_manifest import TensorKey, TensorKind
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import PlanError, TrainingError
from tests import cases
from tests.cases import Case, batches, local_batch

pytestmark = pytest.mark.usefixtures("without_dry_run")

NAN, INF = float("nan"), float("inf")


def build(case: Case, comm: Any, *, skip_nan: int) -> TrainStep:
    model, loss, optimizer = cases.model(case.model), cases.loss(case), cases.optimizer(case)
    plan = case.plan(comm.size)
    return TrainStep(model, loss, optimizer, plan=plan, communicator=comm, clip=case.clip, skip_nan=skip_nan)


def poisoned(case: Case, number: int, sample: int, value: float = NAN) -> list[Any]:
    """The case's global batches; in batch `number` one sample is bad."""
    found = batches(case)
    found[number][0][sample] = value
    return found


@pytest.mark.covering
@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("fields", [
    {},
    {"clip": 0.3},
    {"clip": INF},
    {"microbatches": 2, "optimizer": "SGD"},
    {"model": "unused", "unused": "allow"},
    {"batch_sizes": (12, 11, 12, 2)},
    {"optimizer": "LAMB", "zero": 1},
    {"optimizer": "LARS", "zero": 2, "clip": 0.3},
    {"update": "in_forward"},
    {"update": "in_forward", "zero": 1, "clip": 0.3, "microbatches": 2},
], ids=str)  # fmt: skip
def test_training_with_a_skipped_step_equals_training_without_it(fields, bad):
    case = Case(**{"batch_sizes": (12, 12, 12, 12), **fields})
    found = poisoned(case, bad, sample=1)

    def body(comm):
        step = build(case, comm, skip_nan=1)
        metrics = [step(local_batch(batch, comm.size, comm.rank)) for batch in found]
        assert [m.skipped is not None for m in metrics] == [number == bad for number in range(4)]
        assert metrics[bad].loss != metrics[bad].loss
        good = [m for m in metrics if m.skipped is None]
        step.flush()
        trained = oracle.snapshot(step, [m.loss for m in good], [m.grad_norm for m in good])
        return trained, metrics[bad].skipped

    model, loss = cases.model(case.model), cases.loss(case)
    rest = [batch for number, batch in enumerate(found) if number != bad]
    expected = oracle.train(model, loss, cases.optimizer(case), rest, clip=case.clip)
    results = threads.run(3, body)
    for trained, skipped in results:
        assert oracle.deviation(trained, expected) <= TOLERANCE
        assert skipped == results[0][1]


def test_the_message_names_step_rank_and_samples_of_the_global_order():
    # Positions 12 to 24 in two microbatches on each of two ranks: position 22 is in the last one, on rank 1.
    case = Case(microbatches=2)
    found = poisoned(case, 1, sample=10)
    ids = rows(40, 3, 2, 12, 24).tolist()

    def body(comm):
        step = build(case, comm, skip_nan=5)
        step.num_steps = 7  # as after a resume
        skipped = None
        for number, batch in enumerate(found[:2]):
            start, stop = 12 * number, 12 * number + 12
            place = BatchRange(40, 3, 2, start, stop, *shard_range(start, stop, 2, comm.rank))
            skipped = step(Batch.wrap(local_batch(batch, 2, comm.rank), place)).skipped
        return skipped

    named = ", ".join(map(str, ids[9:12]))
    text = f"step 9: the loss is nan; rank 1, samples {named} (positions 12 to 24 of epoch 2, seed 3)"
    for skipped in threads.run(2, body):
        assert skipped == (text, 1)


def test_a_nonfinite_norm_is_found_before_the_update_even_if_all_losses_are_finite():
    def body(comm):
        model = nn.Linear(2, 2)
        # The root has an infinite derivative at 0; times 0 it is NaN.
        loss: Callable[[Any, Any], Any] = lambda outputs, targets: (outputs * targets).abs().sqrt().sum(1)  # noqa: E731
        step = TrainStep(model, loss, torch.optim.Adam, plan=Plan(dp=2), communicator=comm, clip=1.0, skip_nan=1)
        before = copy.deepcopy(model.state_dict())
        metrics = step((torch.ones(2, 2), torch.zeros(2, 2)))
        assert metrics.loss == 0.0
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        return metrics.skipped

    for skipped in threads.run(2, body):
        assert skipped is not None
        assert skipped.text.startswith("step 1: the gradient norm is nan; every rank's own loss is finite")
        assert skipped.rank is None


def test_by_default_a_nonfinite_step_stops_training_and_changes_nothing():
    case = Case(clip=0.1)
    found = poisoned(case, 2, sample=4, value=INF)

    def body(comm):
        step = build(case, comm, skip_nan=0)
        for batch in found[:2]:
            step(local_batch(batch, 3, comm.rank))
        before = copy.deepcopy(step.state_dict())
        bad = "step 3: the loss is nan; rank 1, samples of its batch 0, 1, 2, 3"
        with pytest.raises(TrainingError, match=rf"(?s){bad}.*skip_nan=10 to skip such steps"):
            step(local_batch(found[2], 3, comm.rank))
        after = step.state_dict()
        assert all(torch.equal(before["model"][name], value) for name, value in after["model"].items())
        for name, states in after["optimizer"].items():
            assert all(
                torch.equal(torch.as_tensor(v), torch.as_tensor(before["optimizer"][name][k]))
                for k, v in states.items()
            )

    threads.run(3, body)


@pytest.mark.parametrize(("bad", "ends_at"), [((0, 1, 2), 3), ((0, 1, 3, 4), None), ((1, 2, 3, 4), 4)])
def test_more_consecutive_bad_steps_than_allowed_stop_training(bad, ends_at):
    case = Case(batch_sizes=(6,) * 5)

    def body(comm):
        step = build(case, comm, skip_nan=2)
        for number, (inputs, targets) in enumerate(batches(case)):
            batch = local_batch((inputs * NAN if number in bad else inputs, targets), 2, comm.rank)
            if number + 1 == ends_at:
                with pytest.raises(TrainingError, match="the 2 steps before were bad too"):
                    step(batch)
                return
            step(batch)

    threads.run(2, body)


def test_a_first_step_with_a_nan_count_sets_no_nominal_count():
    # The gradients of all later steps are divided by the count of the first step.
    case = Case(loss="pair")
    found = poisoned(case, 0, sample=0)
    model, loss, optimizer = cases.model("mlp"), cases.loss(case), cases.optimizer(case)

    def with_nan_count(outputs: Any, targets: Any) -> Any:
        return (outputs.sum(), NAN) if outputs.isnan().any() else loss(outputs, targets)

    def body(comm):
        mine, plan = copy.deepcopy(model), case.plan(2)
        step = TrainStep(mine, with_nan_count, optimizer, plan=plan, communicator=comm, clip=None, skip_nan=1)
        metrics = [step(local_batch(batch, 2, comm.rank)) for batch in found]
        return oracle.snapshot(step, [m.loss for m in metrics[1:]], [])

    results = threads.run(2, body)
    expected = oracle.train(model, loss, optimizer, found[1:])
    for trained in results:
        assert oracle.deviation(trained, expected) <= TOLERANCE


def test_a_skipped_step_restores_running_statistics():
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean: torch.Tensor
            self.mean.lerp_(x.mean(0), 0.5)
            return self.layer(x)

    def body(comm):
        model = Running()
        loss: Callable[[Any, Any], Any] = lambda outputs, targets: outputs.sum(1)  # noqa: E731
        step = TrainStep(model, loss, torch.optim.SGD, plan=Plan(dp=2), communicator=comm, clip=None, skip_nan=1)
        seen = []
        for value in (1.0, NAN, 1.0, NAN):
            step((torch.full((2, 2), value), torch.zeros(2)))
            seen.append(model.mean[0].item())
        return seen

    assert threads.run(2, body) == [[0.5, 0.5, 0.75, 0.75]] * 2


def test_ranks_with_different_skip_nan_are_refused():
    with pytest.raises(PlanError, match=r"rank 0 has skip_nan = 0; rank 1 has skip_nan = 1"):
        threads.run(2, lambda comm: build(Case(), comm, skip_nan=comm.rank))


class Interrupted(Exception):
    """An error of the loss function during the run."""


def task(*, bad: Sequence[int], stop_at: int | None = None) -> ff.Task:
    """Sixteen samples, some of them bad; the run fails in the given step."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 4), torch.randn(16, 2)
    inputs[list(bad)] = NAN
    calls = iter(range(1, 1000))

    def loss(outputs: Any, targets: Any) -> Any:
        if outputs.requires_grad and next(calls) == stop_at:
            raise Interrupted
        return (outputs - targets).square()

    return ff.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        loss=loss,
        data=lambda: ff.Data(train=TensorSource(inputs, targets)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        schedule=lambda step, steps: 1.0 - step / steps,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def saved(folder: Path) -> dict[TensorKey, torch.Tensor]:
    newest = newest_valid(folder)
    assert newest is not None
    with CheckpointReader(newest) as reader:
        return {tensor: reader.tensor(tensor).read_all() for tensor in reader.entries}


def test_a_resumed_run_skips_the_same_steps_and_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    options: dict[str, Any] = {
        "steps": 8,
        "batch_size": 4,
        "ema": 0.5,
        "skip_nan": 3,
        "checkpoint_every": 2,
        "trace_every": 0,
    }
    whole = ff.train(task(bad=[3]), folder=str(tmp_path), name="whole", **options)
    with pytest.raises(Interrupted):
        ff.train(task(bad=[3], stop_at=6), folder=str(tmp_path), name="broken", **options)
    ff.train(task(bad=[3]), folder=str(tmp_path), name="broken", **options)

    skipped = [line["step"] for line in lines(tmp_path / "whole" / "metrics.jsonl") if line.get("skipped")]
    assert len(skipped) == 2  # sample 3, once in each epoch
    assert whole.loss == whole.loss
    expected, got = saved(tmp_path / "whole"), saved(tmp_path / "broken")
    assert any(tensor.kind is TensorKind.EMA for tensor in expected)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())

    faults = lines(tmp_path / "whole" / "faults.jsonl")
    assert [fault["step"] for fault in faults] == skipped
    for fault in faults + lines(tmp_path / "broken" / "faults.jsonl"):
        assert fault["text"].startswith(f"step {fault['step']}: the loss is nan; ")
        assert fault.keys() == {"time", "kind", "step", "rank", "host", "text", "seconds"}
        assert (fault["kind"], fault["rank"], fault["host"], fault["seconds"]) == ("skipped step", 0, None, None)
        assert "rank 0, samples " in fault["text"]
        assert "3" in fault["text"].partition("samples ")[2].partition(" (")[0].split(", ")


def test_the_ema_is_not_updated_in_a_skipped_step(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr(EMA, "update", lambda self, steps: moved.append(steps))
    ff.train(task(bad=[3]), folder=str(tmp_path), name="run", steps=8, batch_size=4, ema=0.5, skip_nan=1)
    skipped = [line["step"] for line in lines(tmp_path / "run" / "faults.jsonl")]
    assert len(skipped) == 2
    assert moved == [number for number in range(1, 9) if number not in skipped]


def test_a_stopped_run_resumes_with_skip_nan(tmp_path):
    options: dict[str, Any] = {
        "steps": 4,
        "batch_size": 4,
        "checkpoint_every": 1,
        "trace_every": 0,
        "folder": str(tmp_path),
    }
    with pytest.raises(TrainingError, match="samples"):
        ff.train(task(bad=[3]), name="run", **options)
    ff.train(task(bad=[3]), name="run", skip_nan=1, **options)
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["finished"] == 4
