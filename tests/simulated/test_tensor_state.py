"""Laws of state on the tensor axis: whole tensors under the model's names, whatever part of them a rank holds."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.restore import CheckpointReader, restore
from fourfold.checkpoint.store import CheckpointStore
from fourfold.comm.communicator import Communicator
from fourfold.optim.ema import EMA
from fourfold.plan.checkpoint_boxes import ELEMENT_BYTES
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError
from tests import cases
from tests.cases import Case
from tests.checkpoint_runs import MemoryLog

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(4, 3, 4), clip=0.05, length=8)


def make_model() -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=16, layers=1, heads=4, kv_heads=2, length=8).model().double()


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def frozen_and_tied(model: Any) -> nn.Module:
    """A language model with a frozen split weight, and a head that is its embedding."""
    model.blocks[0].mlp.down.weight.requires_grad_(False)
    model.head.weight = model.embedding.weight
    model.register_buffer("scale", torch.tensor([3.0, 4.0]))
    return model


# 256 rows on three places: the shards, and so the buckets, differ in size.
UNEVEN = {"dp": 2, "tp": 3, "zero": 2, "rules": {"embedding": "vocabulary", "head": "vocabulary"}}


def make_step(
    comm: Communicator,
    case: Case = CASE,
    *,
    prepare: Callable[[Any], nn.Module] = as_it_is,
    rules: Mapping[str, str] = lm.TENSOR_RULES,
    **fields: Any,
) -> TrainStep:
    plan = Plan(bucket_bytes=12_000, **fields)
    model, optimizer = prepare(make_model()), cases.optimizer(case)
    options = {"clip": case.clip, "tensor": rules}
    return TrainStep(model, cases.loss(case), optimizer, plan=plan, communicator=comm, **options)


def train(step: TrainStep, case: Case = CASE, *, start: int = 0, stop: int | None = None) -> list[float]:
    batches = cases.batches(case)[start:stop]
    return [step(cases.local_batch(batch, step.plan.dp, step.dp_index)).loss for batch in batches]


def size_of(fields: dict[str, Any]) -> int:
    return math.prod(fields.get(axis, 1) for axis in ("dp", "cp", "tp"))


@functools.cache
def one_device(prepare: Callable[[Any], nn.Module] = as_it_is) -> dict[str, Any]:
    """The state of one device after its training."""

    def body(comm: Communicator) -> dict[str, Any]:
        step = make_step(comm, prepare=prepare)
        train(step)
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


MESHES = [{"tp": 2}, {"tp": 4, "zero": 1}, {"dp": 2, "tp": 2, "zero": 2}, {"dp": 2, "tp": 2, "zero": 3, "hosts": 2}]
MESHES += [UNEVEN]


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
        ({"dp": 2, "tp": 2, "zero": 3, "hosts": 2}, {"cp": 2, "tp": 2, "zero": 1}),
        ({"dp": 3, "zero": 1}, {"tp": 4}),
        (UNEVEN, {"dp": 2, "tp": 2}),
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


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": "powersgd", "zero": 2},
        {"sync": "local", "local_steps": 1, "outer_momentum": 0.9},
        {"precision": "bf16", "zero": 1, "prepare": frozen_and_tied},
    ],
)
def test_whatever_a_mesh_remembers_it_goes_on_with_bit_for_bit(fields, tmp_path):
    fields = fields | {"dp": 2, "tp": 2}
    case = dataclasses.replace(CASE, clip=None)

    def begin(comm):
        step = make_step(comm, case, **fields)
        train(step, case, stop=2)
        save(step, tmp_path)
        state = step.state_dict()
        train(step, case, start=2)
        return state, step.state_dict()

    def go_on(comm):
        step = make_step(comm, case, **fields)
        resume(step, tmp_path)
        train(step, case, start=2)
        return step.state_dict()

    def load(comm):
        step = make_step(comm, case, **fields)
        step.load_state_dict(states[comm.rank][0])
        train(step, case, start=2)
        return step.state_dict()

    states = threads.run(4, begin)
    shapes = {name: value.shape for name, value in one_device(fields.get("prepare", as_it_is))["model"].items()}
    # With local steps `state_dict` has means over the ranks, a checkpoint each rank's own.
    for again in (go_on,) if fields.get("sync") == "local" else (go_on, load):
        for state, (_, expected) in zip(threads.run(4, again), states, strict=True):
            assert {name: value.shape for name, value in state["model"].items()} == shapes
            assert flat_tensors(state).keys() == flat_tensors(expected).keys()
            for name, value in flat_tensors(expected).items():
                assert torch.equal(flat_tensors(state)[name], value), name


def flat_tensors(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a state, by the path of their keys."""
    if isinstance(state, Tensor):
        return {prefix: state}
    if not isinstance(state, dict):
        return {}
    return {key: value for name, each in state.items() for key, value in flat_tensors(each, f"{prefix}/{name}").items()}


@pytest.mark.parametrize(
    ("fields", "hosts"),
    [({"tp": 2}, 1), ({"dp": 2, "tp": 2, "zero": 3}, 2), ({"dp": 2, "tp": 2, "precision": "bf16"}, 1)],
)
def test_edits_and_loaded_weights_are_whole_and_those_of_the_first_rank(fields, hosts):
    def body(comm):
        step = make_step(comm, **fields)
        train(step, stop=1)
        before = step.state_dict()["model"]
        with step.edit() as model:
            assert {name: p.shape for name, p in model.named_parameters()} == {n: v.shape for n, v in before.items()}
            for p in model.parameters():
                p.mul_(2.0 if comm.rank == 0 else -5.0)
        edited = step.state_dict()["model"]
        assert all(torch.equal(edited[name], 2.0 * value) for name, value in before.items())
        train(step, start=1, stop=2)
        step.load_weights(before)
        loaded = step.state_dict()["model"]
        assert all(torch.equal(loaded[name], value) for name, value in before.items())
        step.check_drift()
        train(step, start=2)  # the shards are where the step looks for them

    threads.run(size_of(fields), body, hosts=hosts)


def test_training_goes_on_from_an_edit_as_on_one_device():
    def body(comm, **fields):
        step = make_step(comm, **fields)
        train(step, stop=1)
        with step.edit() as model:
            weights = dict(model.named_parameters())
            weights["blocks.0.attention.qkv.weight"][:, ::3] = 0.01
            weights["norm.weight"].add_(0.5)
        train(step, start=1)
        return step.state_dict()["model"]

    (expected,) = threads.run(1, body)
    for got in threads.run(2, lambda comm: body(comm, tp=2)):
        assert_close(got, expected)


def test_weights_in_the_shape_of_a_shard_are_refused():
    def body(comm):
        step = make_step(comm, tp=2)
        shards = {name: p.detach().clone() for name, p in step.model.named_parameters()}
        with pytest.raises(TaskError, match=r"mlp.down.weight of shape \[16, 32\] +need shape \[16, 64\]") as caught:
            step.load_weights(shards)
        assert "norm.weight" not in {problem.got.split()[0] for problem in caught.value.problems}

    threads.run(2, body)


@pytest.mark.parametrize("fields", [{"tp": 4}, {"dp": 2, "tp": 2, "zero": 1}])
def test_ranks_write_about_equally_much_and_read_what_they_keep(fields, tmp_path):
    def begin(comm):
        step = make_step(comm, **fields)
        train(step, stop=1)
        save(step, tmp_path)

    size = size_of(fields)
    threads.run(size, begin)
    (folder,) = tmp_path.glob("**/step-*")
    with CheckpointReader(folder) as reader:
        stored = dict.fromkeys(reader.manifest.files, 0)
        for entry in reader.manifest.tensors:
            for part in entry.parts:
                stored[part.file] += math.prod(part.shape_in_file(entry.shape)) * ELEMENT_BYTES[entry.dtype]
    total = sum(stored.values())
    assert total == sum(3 * 8 * p.numel() for p in make_model().parameters()), "weights and two moments, once"
    assert max(stored.values()) <= 1.1 * total / size
    read = threads.run(size, lambda comm: resume(make_step(comm, **fields), tmp_path))
    kept = 1 / fields["tp"] if "zero" not in fields else (1 / 3 + 2 / 3 / fields["dp"]) / fields["tp"]
    assert max(read) <= 1.3 * kept * total


def test_a_call_of_the_model_inside_an_edit_is_refused():
    def body(comm):
        step = make_step(comm, tp=2)
        inputs, _ = cases.batches(CASE)[0]
        with pytest.raises(TaskError, match=r"inside step\.edit\(\)"), step.edit() as model:
            model(**inputs)
        shapes = {name: tuple(p.shape) for name, p in step.model.named_parameters()}
        assert shapes["head.weight"] == (128, 16), "what an error leaves are the shards"
        train(step, stop=1)  # the hooks are gone

    threads.run(2, body)
