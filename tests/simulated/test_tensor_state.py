"""Laws of state on the tensor axis: whole tensors under the model's names, whatever part of them a rank holds."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.read import CheckpointReader
from fourfold.checkpoint.restore import restore
from fourfold.checkpoint.store import CheckpointStore
from fourfold.parts.comm.communicator import Communicator
from fourfold.plan.plan import Plan
from fourfold.step.ema import EMA
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from tests import cases
from tests.cases import Case
from tests.checkpoint_runs import MemoryLog

CASE = Case(model="lm", batch_sizes=(4, 3, 4), clip=0.05, length=8)
BUCKETS = {"bucket_bytes": 30_000}


def make_step(comm: Communicator, case: Case = CASE, **fields: Any) -> TrainStep:
    plan = Plan(**BUCKETS | fields)
    model, optimizer = cases.model(case.model), cases.optimizer(case)
    options = {"clip": case.clip, "tensor": lm.TENSOR_RULES}
    return TrainStep(model, cases.loss(case), optimizer, plan=plan, communicator=comm, **options)


def train(step: TrainStep, case: Case = CASE, *, start: int = 0, stop: int | None = None) -> list[float]:
    batches = cases.batches(case)[start:stop]
    return [step(cases.local_batch(batch, step.plan.dp, step.dp_index)).loss for batch in batches]


def size_of(fields: dict[str, Any]) -> int:
    return math.prod(fields.get(axis, 1) for axis in ("dp", "sp", "tp"))


def one_device(case: Case = CASE, stop: int | None = None) -> dict[str, Any]:
    """The state of one device after its training."""

    def body(comm: Communicator) -> dict[str, Any]:
        step = make_step(comm, case)
        train(step, case, stop=stop)
        return step.state_dict()

    return threads.run(1, body)[0]


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def optimizer_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{n}.{k}": torch.as_tensor(v) for n, keys in state["optimizer"].items() for k, v in keys.items()}


def save(step: TrainStep, folder: Path, ema: EMA | None = None) -> None:
    manager = CheckpointManager(TrainingState(step, None, ema), AttemptDir(folder, "a"), MemoryLog(), seed=0)
    manager.save(TrainingProgress(step.num_steps, [1.0]))
    manager.wait()


def resume(step: TrainStep, folder: Path, ema: EMA | None = None) -> int:
    """Restore the newest checkpoint; returns the bytes that were read."""
    store = CheckpointStore(folder)
    with CheckpointReader(store.step_dir(max(store.steps()))) as reader:
        restore(TrainingState(step, None, ema), reader, seed=0)
        return reader.num_bytes


MESHES = [{"tp": 2}, {"tp": 4, "zero": 1}, {"dp": 2, "tp": 2, "zero": 1}, {"dp": 2, "tp": 2, "zero": 2}]
MESHES += [{"sp": 2, "tp": 2}, {"dp": 2, "tp": 4, "zero": 3, "hosts": 2}]


@pytest.mark.parametrize("fields", MESHES)
def test_the_state_is_that_of_one_device_and_loading_it_changes_nothing(fields):
    fields = dict(fields)
    hosts = fields.pop("hosts", 1)

    def body(comm):
        step = make_step(comm, **fields)
        train(step)
        state = step.state_dict()
        other = make_step(comm, **fields)
        other.load_state_dict(state)
        again = other.state_dict()
        assert all(torch.equal(again["model"][name], value) for name, value in state["model"].items())
        before = optimizer_tensors(state)
        assert all(torch.equal(value, before[name]) for name, value in optimizer_tensors(again).items())
        named = {name: weight.clone() for name, weight in step.named_weights()}
        return state, named

    expected = one_device()
    for state, named in threads.run(size_of(fields), body, hosts=hosts):
        assert_close(state["model"], expected["model"])
        assert_close(named, {name: expected["model"][name] for name in named})
        assert_close(optimizer_tensors(state), optimizer_tensors(expected))


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        ({"tp": 4, "zero": 1}, {"dp": 2, "tp": 2}),
        ({"dp": 2, "tp": 2, "zero": 2}, {"tp": 2}),
        ({"dp": 2, "tp": 2}, {"dp": 2}),
        ({"dp": 3, "zero": 1}, {"tp": 4}),
        ({"dp": 2, "tp": 4, "zero": 3, "hosts": 2}, {"sp": 2, "tp": 2, "zero": 1}),
    ],
)
def test_a_run_resumes_bit_for_bit_on_its_mesh_and_within_the_law_on_another(saved_on, loaded_on, tmp_path):
    saved_on = dict(saved_on)
    hosts = saved_on.pop("hosts", 1)

    def begin(comm):
        step = make_step(comm, **saved_on)
        ema = EMA(step.weight_shards, 0.9)
        for number in (1, 2):
            train(step, start=number - 1, stop=number)
            ema.update(number)
        save(step, tmp_path, ema)
        return finish(step, ema)

    def finish(step, ema):
        train(step, start=2)
        ema.update(3)
        averages = {}
        with step.swapped_weights(ema.values):
            averages = {name: weight.clone() for name, weight in step.named_weights()}
        return step.state_dict(), averages

    def go_on(comm, fields):
        step = make_step(comm, **fields)
        ema = EMA(step.weight_shards, 0.9)
        resume(step, tmp_path, ema)
        assert step.num_steps == 2
        return finish(step, ema)

    uninterrupted = threads.run(size_of(saved_on), begin, hosts=hosts)
    again = threads.run(size_of(saved_on), lambda comm: go_on(comm, saved_on), hosts=hosts)
    for (state, averages), (expected, expected_averages) in zip(again, uninterrupted, strict=True):
        assert all(torch.equal(state["model"][name], value) for name, value in expected["model"].items())
        assert all(torch.equal(averages[name], value) for name, value in expected_averages.items())
        before = optimizer_tensors(expected)
        assert all(torch.equal(value, before[name]) for name, value in optimizer_tensors(state).items())
    for state, averages in threads.run(size_of(loaded_on), lambda comm: go_on(comm, loaded_on)):
        assert_close(state["model"], one_device()["model"])
        assert_close(averages, uninterrupted[0][1])
