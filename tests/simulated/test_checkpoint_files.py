"""Laws of what a save leaves on disk: which checkpoints, which files, which weights. Ranks are threads."""

import functools
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fourfold.checkpoint import writer
from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.export import export_weights
from fourfold.checkpoint.initial_weights import check_weights, load_weights
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.restore import CheckpointReader
from fourfold.checkpoint.store import CheckpointStore, read_manifest
from fourfold.feed.feed import Feed
from fourfold.optim.ema import EMA
from fourfold.plan.checkpoint_manifest import TensorKey, TensorKind
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.trainer.train import train
from fourfold.words.errors import CheckpointError
from fourfold.words.task import Data, Task
from tests import cases
from tests.cases import Case, batches
from tests.checkpoint_runs import MemoryLog, ThreadRun, save_twice

pytestmark = pytest.mark.usefixtures("without_dry_run")


def test_the_last_checkpoints_and_the_best_one_are_kept(tmp_path):
    case = Case(batch_sizes=(8,) * 6)
    valid = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0}
    every = tuple(range(1, 7))
    threads.run(2, lambda comm: ThreadRun(case, comm, tmp_path).run_steps(0, 6, save_at=every, valid=valid))
    store = CheckpointStore(tmp_path)
    assert store.steps() == [2, 5, 6]
    assert store.best_step() == 2
    assert sorted(path.name for path in store.path.iterdir()) == [store.step_dir(step).name for step in (2, 5, 6)]


def test_a_snapshot_holds_the_weights_at_the_time_it_was_taken(tmp_path, monkeypatch):
    entered, go = threads.threading.Event(), threads.threading.Event()

    def delayed_write(path, snapshot, real=writer.write_snapshot):
        entered.set()
        assert go.wait(30)
        return real(path, snapshot)

    monkeypatch.setattr(writer, "write_snapshot", delayed_write)

    def body(comm):
        run = ThreadRun(Case(), comm, tmp_path)
        run.step(batches(Case())[0])
        then = run.copy_tensors()
        run.checkpoints.save(TrainingProgress(1))
        assert entered.wait(30)
        run.step(batches(Case())[1])  # training continues before anything has been written
        go.set()
        run.checkpoints.wait()
        return then, run.copy_tensors()

    ((then, now),) = threads.run(1, body)
    with CheckpointReader(CheckpointStore(tmp_path).step_dir(1)) as reader:
        assert {tensor.label for tensor in reader.entries} == then.keys()
        for tensor in reader.entries:
            assert torch.equal(reader.tensor(tensor).read_all().reshape(-1), then[tensor.label])
    assert any(not torch.equal(now[name], value) for name, value in then.items())


def test_weights_are_exported_under_the_models_names_and_loaded_again(tmp_path):
    case = Case(model="tied")

    def body(comm):
        run = ThreadRun(case, comm, tmp_path, ema=0.5)
        run.run_steps(0, 3, save_at=(3,))
        assert run.ema is not None
        return run.step.model.state_dict(), {name: value.clone() for name, value in run.ema.values.items()}

    model, averages = threads.run(2, body)[0]
    export_weights(CheckpointStore(tmp_path).step_dir(3), tmp_path / "weights.safetensors")
    export_weights(CheckpointStore(tmp_path).step_dir(3), tmp_path / "ema.safetensors", ema=True)
    exported = load_file(tmp_path / "weights.safetensors")
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], value) for name, value in model.items())
    averaged = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(averaged[name], value) for name, value in averages.items())

    fresh = cases.model("tied")
    load_weights(fresh, tmp_path / "weights.safetensors")
    assert all(torch.equal(value, model[name]) for name, value in fresh.state_dict().items())
    with pytest.raises(CheckpointError, match=r"no spare\.bias"):
        check_weights(cases.model("unused"), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="a safetensors file"):
        check_weights(fresh, tmp_path / "missing.safetensors")


def test_complex_weights_are_not_loaded_into_real_parameters(tmp_path):
    """Torch would keep the real parts."""
    fresh = cases.model("mlp")
    weights = {name: value.to(torch.complex64) for name, value in fresh.state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    for load in (load_weights, check_weights):
        with pytest.raises(CheckpointError, match=r"first\.weight of complex64\s+need numbers that fit into float64"):
            load(fresh, tmp_path / "weights.safetensors")


def test_a_checkpoint_of_complex_weights_is_not_loaded_into_real_parameters(tmp_path):
    def run(comm, dtype):
        module = torch.nn.Linear(2, 2, dtype=dtype)
        plan, sgd = Plan(dp=1), functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(module, lambda outputs, targets: outputs.abs(), sgd, plan=plan, communicator=comm, clip=None)
        step((torch.ones(1, 2, dtype=dtype), torch.zeros(1)))
        feed = Feed([(torch.zeros(1), torch.zeros(1))], batch_size=1)
        return CheckpointManager(TrainingState(step, feed), AttemptDir(tmp_path, "a"), MemoryLog(), seed=0)

    def save(comm):
        checkpoints = run(comm, torch.complex64)
        checkpoints.save(TrainingProgress(1))
        checkpoints.wait()

    threads.run(1, save)
    with pytest.raises(CheckpointError, match=r"model\.weight of complex64\s+need numbers that fit into float32"):
        threads.run(1, lambda comm: run(comm, torch.float32).resume())
    (progress,) = threads.run(1, lambda comm: run(comm, torch.complex64).resume())
    assert progress is not None


def test_an_ema_follows_its_definition(tmp_path):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    average, expected = EMA({"w": weight}, 0.9), weight.detach().clone()
    for step in range(1, 20):
        with torch.no_grad():
            weight.add_(0.1)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach()
    torch.testing.assert_close(average.values["w"], expected, rtol=1e-5, atol=1e-6)


def test_files_are_balanced_in_bytes(tmp_path):
    store = save_twice(tmp_path, 4)
    sizes = [file.num_bytes for file in read_manifest(store.step_dir(3)).files.values()]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)


def test_a_task_that_changes_the_working_directory_does_not_move_its_run(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def loss(outputs, targets):
        os.chdir(tmp_path / "elsewhere")
        return (outputs - targets) ** 2

    task = Task(
        model=functools.partial(torch.nn.Linear, 2, 1),
        loss=loss,
        data=lambda: Data(train=[(torch.full((2,), 0.1 * n), torch.zeros(1)) for n in range(8)]),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        steps=4,
        batch_size=4,
    )
    result = train(task, Plan(), name="moved", checkpoint_every=2)
    assert result.folder == tmp_path / "runs" / "moved"
    assert CheckpointStore(tmp_path / "runs" / "moved").steps() == [2, 4]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_buffers_of_a_checkpoint_are_rank_0s(tmp_path):
    """With batch_norm = "local" the ranks' buffers differ."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def loss(outputs, targets):
        return (outputs - targets).square()

    def body(comm):
        model = nn.BatchNorm1d(4)
        step = TrainStep(model, loss, sgd, plan=Plan(dp=2, batch_norm="local"), communicator=comm)
        step((torch.randn(4, 4), torch.zeros(4, 4)))
        model.get_buffer("running_mean").fill_(comm.rank)
        checkpoints = CheckpointManager(TrainingState(step, None), AttemptDir(tmp_path, "a"), MemoryLog(), seed=0)
        checkpoints.save(TrainingProgress(1))
        checkpoints.wait()

    threads.run(2, body)
    with CheckpointReader(CheckpointStore(tmp_path).step_dir(1)) as reader:
        assert not reader.tensor(TensorKey(TensorKind.MODEL, "running_mean")).read_all().any()
