"""Laws of a run's length and of `ff.train` on what people have as data: epochs, drop_last, DataLoaders, streams."""

import functools
from typing import Any

import datasets
import pytest
import torch
from torch.utils import data

import fourfold as ff
from fourfold.feed.source import TensorSource
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.trainer.evaluate import evaluate
from fourfold.trainer.run_identity import run_identity
from fourfold.trainer.settings import make_settings
from fourfold.verification.command import verify
from fourfold.words.errors import DataError, FourfoldError, SettingError, TaskError
from tests.jobs import prepare_job

pytestmark = pytest.mark.usefixtures("without_dry_run")

INPUTS = torch.randn(22, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.square().sum(1)
PAIRS = data.TensorDataset(INPUTS, TARGETS)


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter([PAIRS[index] for index in range(len(PAIRS))])


class SizedStream(Stream):
    def __len__(self):
        return len(PAIRS)


def task(train: Any = PAIRS, valid: Any = None, **fields: Any) -> ff.Task:
    return ff.Task(
        model=lambda: torch.nn.Linear(3, 1).double(),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square(),
        data=lambda: ff.Data(train=train, valid=valid),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        **fields,
    )


def run(folder, given, name="run", **options):
    return ff.train(given, ff.Plan(), folder=str(folder), name=name, **options)


@pytest.mark.parametrize(("given", "options", "steps"), [
    (task(batch_size=4), {"epochs": 2}, 12),
    (task(batch_size=4, epochs=2), {}, 12),
    (task(batch_size=4, steps=3), {"epochs": 2, "drop_last": True}, 10),
    (task(batch_size=4, epochs=2), {"steps": 3}, 3),
    (task(batch_size=4, steps=0), {"checkpoint_every": 1}, 0),
    (task(data.DataLoader(PAIRS, batch_size=5, drop_last=True), epochs=3), {}, 12),
    (task(data.DataLoader(PAIRS, batch_size=5, drop_last=True), epochs=3), {"batch_size": 8, "drop_last": False}, 9),
    (task(SizedStream(), batch_size=4), {"epochs": 2}, 12),
])  # fmt: skip
def test_epochs_are_as_many_steps_as_they_have_batches(tmp_path, given, options, steps):
    assert run(tmp_path, given, **options).steps == steps


REFUSED = {
    "both": (task(batch_size=4), {"steps": 3, "epochs": 2}, "steps = 3 and epochs = 2 .* one of them"),
    "no length": (task(Stream()), {"epochs": 2}, r"epochs = 2, and training data that does not say .* try steps=…"),
    "several workers": (
        task(data.DataLoader(SizedStream(), num_workers=2)), {"epochs": 2}, "training data that does not say",
    ),
    "no batch": (task(batch_size=40), {"epochs": 2, "drop_last": True}, "22 samples, batch_size = 40 and drop_last"),
    "no number": (task(), {"epochs": 1.5}, "epochs = 1.5"),
    "tuned for": (task(), {"rates": ff.LRSchedule(scale="linear"), "batch_size": 64}, "a task without a batch size"),
}  # fmt: skip


@pytest.mark.parametrize("which", list(REFUSED))
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_length_that_cannot_be_is_refused_before_the_run_begins(tmp_path, which):
    given, options, message = REFUSED[which]
    with pytest.raises(SettingError, match=message):
        run(tmp_path, given, **options)
    assert not list(tmp_path.iterdir())


def test_a_task_of_steps_and_epochs_is_refused():
    with pytest.raises(TaskError, match="steps = 3 and epochs = 2"):
        task(steps=3, epochs=2)


def test_a_run_of_epochs_is_the_same_run_whatever_the_length_of_its_data():
    given = make_settings(task(batch_size=4, steps=3), epochs=2)
    identity = run_identity(given, ff.Plan())
    assert identity["epochs"] == 2
    assert "steps" not in identity
    assert "epochs" not in run_identity(make_settings(task(batch_size=4, steps=3)), ff.Plan())


class Interrupted(Exception):
    pass


def interrupted(step, _):
    if step == 7:
        raise Interrupted
    return 1.0


def loader(**how):
    def collate(samples):
        inputs, targets = data.default_collate(samples)
        return inputs + 0.1 * torch.rand(inputs.shape), targets

    return data.DataLoader(PAIRS, batch_size=5, shuffle=True, collate_fn=collate, **how)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "make",
    [loader, functools.partial(loader, num_workers=1), Stream],
    ids=["loader", "worker", "stream"],
)
def test_a_run_resumes_in_the_middle_of_an_epoch_to_the_same_bits(tmp_path, make):
    uninterrupted = run(tmp_path, task(make(), PAIRS, steps=11), "whole")
    with pytest.raises(Interrupted):
        run(tmp_path, task(make(), PAIRS, steps=11, schedule=interrupted), checkpoint_every=2)
    resumed = run(tmp_path, task(make(), PAIRS, steps=11), checkpoint_every=2)
    assert resumed.valid == uninterrupted.valid


def test_a_run_with_another_order_than_the_saved_one_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, task(batch_size=5, steps=11, schedule=interrupted), checkpoint_every=2)
    in_order = data.DataLoader(PAIRS, batch_size=5)
    with pytest.raises(FourfoldError, match="saved in the order: global; now: in the source"):
        run(tmp_path, task(in_order, batch_size=5, steps=11), checkpoint_every=2)


VALID = {
    "source": PAIRS,
    "loader": data.DataLoader(PAIRS, batch_size=4, shuffle=True, drop_last=True),
    "stream": data.DataLoader(Stream(), batch_size=4),
    "datasets": datasets.Dataset.from_dict({"x": INPUTS.tolist(), "y": TARGETS.tolist()}).with_format("torch"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["source", "loader", "stream"])
def test_validation_is_the_mean_over_all_samples_of_any_kind_of_data_on_any_mesh(kind, size):
    def body(comm):
        torch.manual_seed(0)
        given = task()
        step = TrainStep(
            given.model(), given.loss, given.optimizer, plan=ff.Plan(dp=comm.size), communicator=comm, clip=None
        )
        measures = evaluate(step, given, VALID[kind], 6).metrics
        (weight, bias) = (p.detach().clone() for p in step.model.parameters())
        return measures["loss"], ((INPUTS @ weight[0] + bias - TARGETS) ** 2).mean().item()

    for found, expected in threads.run(size, body):
        assert found == pytest.approx(expected, abs=1e-9)


def test_a_validation_stream_that_differs_between_ranks_is_refused_on_every_rank():
    def body(comm):
        given = task()
        step = TrainStep(given.model(), given.loss, given.optimizer, plan=ff.Plan(dp=2), communicator=comm, clip=None)

        class Divided(data.IterableDataset):
            def __iter__(self):
                return iter([PAIRS[index] for index in range(comm.rank, len(PAIRS), 2)])

        with pytest.raises(TaskError, match="another source on rank 1"):
            evaluate(step, given, Divided(), 4)
        with pytest.raises(DataError, match="a stream without samples"):
            evaluate(step, given, Empty(), 4)
        return True

    assert threads.run(2, body) == [True, True]


class Empty(data.IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("make", [lambda: data.DataLoader(PAIRS, batch_size=5, drop_last=True), Stream, lambda: PAIRS])
def test_verify_reads_any_kind_of_data(make):
    result = verify(task(make(), steps=6), ff.Plan(microbatches=2))
    assert result is not None
    assert result.max_deviation < 1e-9


TASK_FILE = """
import torch, fourfold as ff
from torch.utils.data import DataLoader, TensorDataset

rows = TensorDataset(torch.ones(22, 3), torch.ones(22, 1))

def task():
    return ff.Task(model=lambda: torch.nn.Linear(3, 1), loss=torch.nn.functional.mse_loss, steps=9,
        data=lambda: ff.Data(train=DataLoader(rows, batch_size=6, shuffle=True)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


def test_the_command_line_takes_epochs_and_the_batch_size_of_the_loader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK_FILE)
    job = prepare_job(["mine.py", "epochs=3", "drop_last=true"], num_processes=1)
    messages = []

    class Display:
        def start(self, text): ...
        def show_step(self, line): ...
        def show_wait(self, text): ...
        def print_message(self, text):
            messages.append(text)

        def finish(self, text): ...

    result = ff.train(job.task, job.plan, report=Display(), **job.settings)
    assert result.steps == 9  # 3 epochs of 3 whole batches
    assert "3 epochs of 22 samples, in batches of 6: 3 steps each, 9 in all" in messages
    assert "train: shuffled by the feed and its seed, not by the sampler of the DataLoader" in messages
    again = prepare_job(["mine.py", "epochs=3", "drop_last=true"], num_processes=1)
    assert again.run_dir == job.run_dir
    resolved = prepare_job([str(job.run_dir / "config.toml")], num_processes=1)
    assert resolved.identity == job.identity
    with pytest.raises(FourfoldError, match="batch_size = 6, dp = 4"):
        prepare_job(["mine.py", "dp=4"], num_processes=4)
    with pytest.raises(FourfoldError, match="steps = 4 and epochs = 3"):
        prepare_job(["mine.py", "epochs=3", "steps=4"], num_processes=1)


def test_a_task_without_any_size_has_1000_steps_of_32_samples():
    assert make_settings(task()).steps == 1000
    assert ff.Feed(TensorSource(INPUTS, TARGETS), batch_size=32).batch_size == 32
