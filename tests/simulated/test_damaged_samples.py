"""Laws of damaged samples: left out and not replaced, named, counted the same on all ranks."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fourfold as ff
from fourfold.feed.feed import Feed
from fourfold.feed.readable import fetch_readable
from fourfold.feed.sample_rng import fetch_one
from fourfold.feed.source import TensorSource
from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.testing import threads
from fourfold.trainer.evaluate import evaluate
from fourfold.words.errors import DataError, TaskError
from tests import cases
from tests.cases import Case
from tests.simulated.test_feed import Interrupted, interrupted

pytestmark = pytest.mark.usefixtures("without_dry_run")

LENGTH = 30
INPUTS = torch.randn(LENGTH, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.square().sum(1)


class Damaged:
    """A source of which some samples cannot be read."""

    def __init__(self, bad, source=None):
        self.bad, self.source = frozenset(bad), source or TensorSource(INPUTS, torch.arange(LENGTH).double())

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.check(index)
        return self.source[index]

    def check(self, index):
        if index in self.bad:
            raise ff.DamagedSample(f"part-{index // 10}, record {index % 10}", "its digest is another one")


class Fetching(Damaged):
    """The same, read in batches."""

    def fetch(self, indices):
        for index in indices:
            self.check(index)
        return self.source.fetch(indices)


class Many(Damaged):
    """The same, read as `datasets` reads a table."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Random(Damaged):
    """Samples that draw random numbers."""

    def __getitem__(self, index):
        self.check(index)
        return torch.rand(3, dtype=torch.float64), float(index)


KINDS = [Damaged, Fetching, Many, Random]


def record(number):
    return DamagedRecord(number, f"part-{number // 10}, record {number % 10}", "its digest is another one")


def fed(source, size=1, index=0, **options):
    feed = Feed(source, **options)
    feed._size, feed._index, feed.leaves_damage_to_caller = size, index, True
    return feed


def rows(feed):
    """The samples of an epoch's batches, by batch, each with its number."""
    return [
        dict(zip(batch[1].tolist(), batch[0].tolist(), strict=True)) | {"after": feed.state, "damaged": batch.damaged}
        for batch in feed
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(
    bad=st.sets(st.integers(0, LENGTH - 1), max_size=LENGTH - 1),
    size=st.integers(1, 4),
    batch_size=st.integers(1, 40),
    data=st.data(),
)
@settings(deadline=None, max_examples=12)
def test_a_batch_is_that_of_a_whole_source_without_the_damaged_samples(kind, bad, size, batch_size, data):
    # fetch() shows the shapes of a batch without samples by one of 64: with 30 samples, by any of them.
    index = data.draw(st.integers(0, size - 1))
    whole, damaged = (rows(fed(kind(each), size, index, batch_size=batch_size, seed=3)) for each in ((), bad))
    for expected, found in zip(whole, damaged, strict=True):
        records = found.pop("damaged")
        assert expected.pop("after") == found.pop("after")
        assert [each.number for each in records] == [n for n in expected if n in bad and n != "damaged"]
        assert all(each == record(int(each.number)) for each in records)
        assert found == {n: row for n, row in expected.items() if n not in bad and n != "damaged"}


def test_workers_leave_out_the_same_samples():
    bad = {0, 4, 5, 17}
    source: Any = Damaged(bad)
    loader = DataLoader(source, batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="fork")
    assert rows(fed(loader)) == rows(fed(Damaged(bad), batch_size=4))


def test_samples_of_a_batch_name_those_that_are_left():
    for batch in fed(Fetching({3, 8, 9}), batch_size=7):
        assert batch.samples.sample_ids() == batch[1].tolist()
        assert len(batch[1]) == batch.samples.stop - batch.samples.start - len(batch.samples.left_out)


def test_the_first_damaged_sample_is_raised_at_its_own_batch_with_its_key():
    whole = list(ff.Feed(Damaged(()), batch_size=4))
    bad = int(whole[3][1][2])
    feed = ff.Feed(Damaged({bad}), batch_size=4)
    with pytest.raises(
        ff.DamagedSample, match=f"part-{bad // 10}, record {bad % 10} cannot be read: its digest"
    ) as found:
        list(feed)
    assert found.value.key == record(bad).key
    assert feed.state.position == 12


@pytest.mark.parametrize("bad_samples", [1, 2, 5])
def test_a_feed_leaves_out_as_many_samples_as_it_may_however_often_they_come(bad_samples):
    bad = set(range(0, 2 * bad_samples, 2))
    feed = ff.Feed(Damaged(bad), batch_size=4, bad_samples=bad_samples)
    for _ in range(3):
        assert sum(len(batch[1]) for batch in feed) == LENGTH - len(bad)
    feed = ff.Feed(Damaged(bad | {21}), batch_size=4, bad_samples=bad_samples)
    with pytest.raises(DataError, match=f"need at most bad_samples = {bad_samples}") as found:
        list(feed)
    assert all(record(number).key in str(found.value) for number in bad)


def test_a_source_of_which_nothing_can_be_read_is_refused():
    source = Damaged(range(LENGTH))
    with pytest.raises(DataError, match="30 samples of which none can be read, the first of them part-0, record 0"):
        fetch_readable(source, [3, 4])
    assert fetch_one(Damaged(range(LENGTH - 1)), 0)[1].tolist() == [LENGTH - 1]


def test_a_sample_that_can_be_read_the_next_time_is_not_left_out():
    class Flaky(Damaged):
        def check(self, index):
            if index == 7 and not self.bad:
                self.bad = frozenset([-1])
                raise ff.DamagedSample("7", "once")

    (batch,) = fed(Flaky(()), batch_size=LENGTH)
    assert (len(batch[1]), batch.damaged) == (LENGTH, ())


def test_a_mixture_names_the_source_of_a_damaged_sample():
    for kind in (Damaged, Fetching):
        parts = {"good": ff.Weighted(kind(()), 1), "bad": ff.Weighted(kind({12}), 1)}
        found = [each for batch in fed(ff.Mixed(parts), batch_size=8) for each in batch.damaged]
        assert found == [DamagedRecord(LENGTH + 12, "bad: part-1, record 2", "its digest is another one")]


# ---- training ----

MESHES = [(1, {}), (2, {}), (3, {}), *((size, {axis: 2}) for axis in ("cp", "tp", "pp") for size in (2, 4))]
BAD = {1, 2, 3, 9, 11}


def case_source(case):
    """The samples of a case's batches, as one source."""
    made = cases.batches(case)
    targets = torch.cat([targets for _, targets in made])
    if isinstance(made[0][0], dict):
        inputs = {name: torch.cat([each[name] for each, _ in made]) for name in made[0][0]}
        return [({name: each[index] for name, each in inputs.items()}, targets[index]) for index in range(len(targets))]
    return [(each, target) for each, target in zip(torch.cat([i for i, _ in made]), targets, strict=True)]


def build_step(case, comm, pp):
    """The case's step, with `pp` stages."""
    plan = dataclasses.replace(case.plan(comm.size // pp), pp=pp)
    options = {"clip": case.clip, "tensor": cases.TENSOR_RULES.get(case.model, {})}
    return ff.TrainStep(
        cases.model(case.model), cases.loss(case), cases.optimizer(case), plan=plan, communicator=comm, **options
    )


def trained(case, size, bad, batch_size=4, *, pp=1):
    """The weights of all ranks after an epoch, and what their metrics say."""
    source = case_source(case)

    def body(comm):
        step = build_step(case, comm, pp)
        feed = fed(Damaged(bad, source), step.plan.dp, step.dp_index, batch_size=batch_size)
        metrics = [step(batch) for batch in feed]
        said = [(m.samples, [each.number for each in m.damaged], m.skipped is not None) for m in metrics]
        weights = step.state_dict()["model"]
        return {name: value.detach().clone() for name, value in weights.items()}, said

    return threads.run(size, body)


@pytest.mark.covering
@pytest.mark.parametrize(("size", "axes"), MESHES)
@pytest.mark.parametrize("bad", [BAD, set(range(10))])
def test_training_without_damaged_samples_is_the_same_on_every_mesh(size, axes, bad):
    pp = axes.get("pp", 1)
    others = {axis: count for axis, count in axes.items() if axis != "pp"}
    case = Case(model="mlp" if axes.get("cp", pp) == 1 else "lm", batch_sizes=(4, 4, 4), **others)
    alone = Case(model=case.model, batch_sizes=(4, 4, 4))
    ((expected, said),) = trained(alone, 1, bad)
    numbers = list(itertools.chain(*(batch for _, batch, _ in said)))
    assert sorted(numbers) == sorted(bad)
    assert sum(samples for samples, _, _ in said) == 12 - len(bad)
    for weights, each in trained(case, size, bad, pp=pp):
        assert [(s, sorted(d), k) for s, d, k in each] == [(s, sorted(d), k) for s, d, k in said]
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_a_batch_of_damaged_samples_only_is_skipped_and_changes_nothing(size, which):
    case = Case(model="mlp", batch_sizes=(4, 4, 4))
    order = [batch.samples.sample_ids() for batch in fed(Damaged((), case_source(case)), batch_size=4)]
    results = trained(case, size, set(order[which]))
    ((expected, _),) = trained(case, 1, set(order[which]))
    for weights, said in results:
        assert [skipped for _, _, skipped in said] == [index == which for index in range(3)]
        assert sorted(said[which][1]) == sorted(order[which])
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"tp": 2}])
def test_ranks_that_share_samples_and_cannot_all_read_them_are_refused_on_every_rank(axes):
    case = Case(model="lm" if "cp" in axes else "mlp", batch_sizes=(4, 4, 4), **axes)

    def body(comm):
        step = cases.build_step(case, comm.size, comm)
        feed = fed(Damaged({5} if comm.rank else (), case_source(case)), step.plan.dp, step.dp_index, batch_size=12)
        with pytest.raises(TaskError, match="different batches on some of ranks 0, 1"):
            step(next(iter(feed)))
        return True

    assert all(threads.run(2, body))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bad", [{4}, set(range(20)), {0, 29}])
def test_an_evaluation_leaves_out_and_names_the_same_samples_on_every_rank(size, bad):
    source = Damaged(bad, TensorSource(INPUTS, TARGETS))
    kept = [index for index in range(LENGTH) if index not in bad]

    def body(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1).double()
        step = ff.TrainStep(
            model, lambda o, t: (o[:, 0] - t).square(), lambda p: torch.optim.SGD(p, lr=0.1),
            plan=ff.Plan(dp=comm.size), communicator=comm, clip=None,
        )  # fmt: skip
        task = ff.Task(model=lambda: model, loss=None, data=lambda: ff.Data(train=source), optimizer=torch.optim.SGD)
        weight, bias = model.parameters()
        expected = (INPUTS[kept] @ weight.detach()[0] + bias.detach() - TARGETS[kept]).square().mean().item()
        found = evaluate(step, task, source, 4)
        assert sorted(found.damaged) == sorted(map(record, bad))
        return found.metrics["loss"] - expected

    assert max(map(abs, threads.run(size, body))) < 1e-9


# ---- runs ----


def run(folder, train, valid=None, *, name="run", steps=8, schedule=None, **options):
    task = ff.Task(
        model=lambda: torch.nn.Linear(3, 1).double(),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square(),
        data=lambda: ff.Data(train=train, valid=valid),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        schedule=schedule,
        steps=steps,
        batch_size=4,
    )
    how = {"folder": str(folder), "name": name, "quiet": True, "checkpoint_every": 2, **options}
    ff.train(task, ff.Plan(), **how)
    return folder / name


def faults(path):
    lines = map(json.loads, (path / "faults.jsonl").read_text().splitlines())
    return [(line["kind"], line["step"], line["text"]) for line in lines]


def saved(path):
    newest = max((path / "checkpoints").glob("step-*"))
    return json.loads((newest / "manifest.json").read_text())["manifest"].get("damaged", [])


def steps_of(bad):
    """In which step of a run each sample is first left out."""
    order = [batch.samples.sample_ids() for batch in fed(Damaged(()), batch_size=4)]
    return {number: next(step for step, ids in enumerate(order, 1) if number in ids) for number in bad}


def test_a_run_lists_damaged_samples_once_in_its_faults_and_checkpoints(tmp_path):
    bad = {3, 14, 15}
    path = run(tmp_path, Damaged(bad), Fetching({7}, TensorSource(INPUTS, TARGETS)), steps=20, bad_samples=4)
    found = faults(path)
    assert {kind for kind, _, _ in found} == {"damaged sample"}
    first = steps_of(bad)
    assert {(step, text) for _, step, text in found} == {(first[n], str(record(n))) for n in bad} | {
        (20, str(record(7)))
    }
    assert len(found) == 4
    assert sorted(each[0] for each in saved(path)) == [3, 7, 14, 15]


@pytest.mark.parametrize("bad_samples", [0, 1])
def test_one_damaged_sample_too_many_ends_the_run_with_its_key(bad_samples, tmp_path):
    bad = sorted(steps_of({3, 14}).items(), key=lambda each: each[1])
    number, step = bad[bad_samples]
    with pytest.raises(DataError, match=f"{record(number).key} cannot be read") as found:
        run(tmp_path, Damaged({3, 14}), bad_samples=bad_samples)
    assert f"the data of step {step}" in str(found.value)
    assert [fault[1] for fault in faults(tmp_path / "run")] == [step for _, step in bad[: bad_samples + 1]]
    run(tmp_path, Damaged({3, 14}), bad_samples=2)  # not part of the identity: the run goes on


def test_a_damaged_validation_sample_ends_the_run_too(tmp_path):
    with pytest.raises(DataError, match="part-0, record 7 cannot be read"):
        run(tmp_path, Damaged(()), Damaged({7}, TensorSource(INPUTS, TARGETS)), steps=2)


def test_a_resumed_run_counts_the_damaged_samples_of_before(tmp_path):
    first = [number for number, step in steps_of(range(LENGTH)).items() if step in (1, 3)][:2]
    late = next(number for number, step in steps_of(range(LENGTH)).items() if step == 7)
    bad = {*first, late}
    whole = run(tmp_path, Damaged(bad), name="whole", bad_samples=3)
    with pytest.raises(Interrupted):
        run(tmp_path, Damaged(bad), schedule=interrupted, bad_samples=3)
    path = run(tmp_path, Damaged(bad), bad_samples=3)
    assert saved(path) == saved(whole)
    assert len(saved(path)) == 3
    with pytest.raises(Interrupted):
        run(tmp_path, Damaged(bad), name="fewer", schedule=interrupted, bad_samples=2)
    with pytest.raises(DataError, match=f"3 damaged samples: .*{record(late).key}"):
        run(tmp_path, Damaged(bad), name="fewer", bad_samples=2)
