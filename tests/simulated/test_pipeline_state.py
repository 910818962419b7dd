"""The state of a pipeline: one state dict, one checkpoint, one set of outputs, whichever stage a rank has."""

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.restore import CheckpointReader, restore
from fourfold.checkpoint.store import CheckpointStore
from fourfold.model.model_call import call_model
from fourfold.optim.ema import EMA
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import CheckpointError, PlanError, TaskError
from tests import cases
from tests.cases import Case
from tests.checkpoint_runs import MemoryLog

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(4, 3, 5), length=8, clip=0.05, microbatches=2)
INTERLEAVED = {"pp": 2, "schedule": "interleaved", "interleave": 2}
# A codec's messages depend on the buckets: each parameter has its own.
CODED: dict[str, Any] = {"dp": 2, "codec": "topk", "codec_density": 0.2, "bucket_bytes": 1}
CODED_MATRICES = {**CODED, "codec": "powersgd", "zero": 1}
MESHES: list[dict[str, Any]] = [
    {"dp": 1},
    {"pp": 2, "dp": 2, "zero": 1},
    {"pp": 4},
    {"pp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "dp": 2, "zero": 3},
    INTERLEAVED,
]


def make_model(layers: int = 4) -> torch.nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=16, layers=layers, heads=2, length=16, warmup=0).model().double()


def make_step(comm: Any, *, layers: int = 4, **fields: Any) -> TrainStep:
    plan = Plan(**{"bucket_bytes": 4_000, "microbatches": CASE.microbatches, **fields})
    rules = lm.TENSOR_RULES if plan.tp > 1 else {}
    options = {"clip": CASE.clip, "tensor": rules, "drift_check": 1}
    model = make_model(layers)
    return TrainStep(model, cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm, **options)


def train(step: TrainStep, start: int = 0, stop: int | None = None) -> list[float]:
    batches = cases.batches(CASE)[start:stop]
    return [step(cases.local_batch(batch, step.plan.dp, step.dp_index)).loss for batch in batches]


def size_of(fields: dict[str, Any]) -> int:
    return math.prod(fields.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))


def run(fields: dict[str, Any], body: Any) -> list[Any]:
    return threads.run(size_of(fields), lambda comm: body(make_step(comm, **fields)))


@functools.cache
def one_device() -> dict[str, Any]:
    """The state of one device after its training."""

    def body(step: TrainStep) -> dict[str, Any]:
        train(step)
        return step.state_dict()

    return run({"dp": 1}, body)[0]


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def optimizer_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{n}.{k}": torch.as_tensor(v) for n, keys in state["optimizer"].items() for k, v in keys.items()}


@pytest.mark.parametrize("fields", MESHES[1:])
def test_every_rank_has_the_state_of_one_device_and_loading_it_changes_nothing(fields):
    def body(step):
        train(step)
        state = step.state_dict()
        step.load_state_dict(state)
        again = step.state_dict()
        assert all(torch.equal(again["model"][name], value) for name, value in state["model"].items())
        named = {name: weight.clone() for name, weight in step.named_weights()}
        return state, named, dict(step.model.named_parameters()).keys()

    expected, owned = one_device(), []
    for state, named, own in run(fields, body):
        assert_close(state["model"], expected["model"])
        assert_close(named, expected["model"])
        assert_close(optimizer_tensors(state), optimizer_tensors(expected))
        owned.append(set(own))
    held = {frozenset(each) for each in owned}
    assert len(held) == fields["pp"]
    assert set().union(*held) == expected["model"].keys()
    assert all(not a & b for a, b in itertools.combinations(held, 2)), "a rank keeps its own stages only"


def save(step: TrainStep, folder: Path, ema: EMA | None) -> None:
    manager = CheckpointManager(TrainingState(step, None, ema), AttemptDir(folder, "a"), MemoryLog(), seed=0)
    manager.save(TrainingProgress(step.num_steps, [1.0]))
    manager.wait()


@pytest.mark.parametrize(("saved", "resumed"), [
    *itertools.pairwise(MESHES), (INTERLEAVED, {"pp": 2, "dp": 2}), ({**CODED, "pp": 2}, CODED),
    (CODED, {**CODED, **INTERLEAVED}), (CODED_MATRICES, {**CODED_MATRICES, "pp": 2}),
])  # fmt: skip
def test_a_checkpoint_of_any_mesh_continues_on_any_other(tmp_path, saved, resumed):
    def first(step):
        ema = EMA(step.weight_shards, 0.5)
        train(step, stop=1)
        ema.update(step.num_steps)
        save(step, tmp_path, ema)
        return train(step, start=1), step.state_dict(), None

    def second(step):
        ema = EMA(step.weight_shards, 0.5)
        store = CheckpointStore(tmp_path)
        with CheckpointReader(store.step_dir(max(store.steps()))) as reader:
            restore(TrainingState(step, None, ema), reader, seed=0)
        with step.swapped_weights(ema.values):
            averaged = {name: weight.clone() for name, weight in step.named_weights()}
        return train(step, start=1), step.state_dict(), averaged

    losses, state, _ = run(saved, first)[0]
    for other_losses, other, averaged in run(resumed, second):
        assert other_losses == pytest.approx(losses, rel=TOLERANCE)
        assert_close(other["model"], state["model"])
        assert averaged.keys() == state["model"].keys()


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(tmp_path):
    run({"pp": 2}, lambda step: (train(step, stop=1), save(step, tmp_path, None)))

    def other(comm):
        step, store = make_step(comm, pp=2, layers=5), CheckpointStore(tmp_path)
        with CheckpointReader(store.step_dir(1)) as reader, pytest.raises(CheckpointError, match=r"blocks\.4"):
            restore(TrainingState(step, None), reader, seed=0)

    threads.run(2, other)


def test_a_state_of_another_model_is_refused_on_all_ranks():
    state = one_device()
    state = {**state, "model": {**state["model"], "spare.weight": torch.zeros(2)}}

    def body(step):
        with pytest.raises(TaskError, match=r"spare\.weight"):
            step.load_state_dict(state)
        with pytest.raises(TaskError, match=r"spare\.weight"):
            step.load_weights({"spare.weight": torch.zeros(2)})
        step.load_weights(one_device()["model"])
        return dict(step.named_weights())

    for weights in run({"pp": 2}, body):
        assert_close(weights, one_device()["model"])


@pytest.mark.parametrize("fields", [{"pp": 2, "dp": 2, "zero": 3}, {"pp": 2, "tp": 2}, INTERLEAVED])
def test_evaluation_and_inference_are_those_of_one_device(fields):
    batch = cases.batches(CASE)[0]
    model = make_model().eval()
    with torch.no_grad():
        outputs = call_model(model, batch[0])
        expected = cases.loss(CASE)(outputs, batch[1]).mean().item()

    def body(step):
        local = cases.local_batch(batch, step.plan.dp, step.dp_index)
        metrics = step.evaluate(local)
        ran = step.run_forward(local)
        with step.inference() as made:
            inferred = made(**{name: tensor[:1] for name, tensor in batch[0].items()})
        return metrics.loss, metrics.samples, ran is not None, inferred

    results = run(fields, body)
    for loss, samples, _, inferred in results:
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert samples == len(batch[1])
        torch.testing.assert_close(inferred, outputs[:1], rtol=TOLERANCE, atol=TOLERANCE)
    ranks_of_last_stage = size_of(fields) // fields["pp"]
    assert [ran for _, _, ran, _ in results] == [False] * ranks_of_last_stage + [True] * ranks_of_last_stage


def test_the_whole_model_is_not_given_to_a_rank_that_has_a_stage():
    def body(step):
        with pytest.raises(PlanError, match=r"step\.inference\(\)"), step.unsharded():
            pass

    run({"pp": 2}, body)


def test_weights_that_are_edited_are_those_of_the_own_stage():
    def body(step):
        with step.edit() as model, torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(step.rank + 1.0)
        return {name: weight.clone() for name, weight in step.named_weights()}

    first = dict(make_model().named_parameters())
    for weights in run({"pp": 2, "dp": 2}, body):
        added = {name: round((weights[name] - first[name]).mean().item(), 6) for name in first}
        assert {added["embedding.weight"], added["head.weight"]} == {1.0, 3.0}
