"""Laws of local SGD. Ranks are threads."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fourfold as ff
from fourfold.checkpoint.restore import CheckpointReader
from fourfold.checkpoint.store import CheckpointStore, newest_valid
from fourfold.plan.checkpoint_manifest import TensorKey
from fourfold.plan.intervals import is_due
from fourfold.plan.plan import Plan
from fourfold.show.describe import show
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import SettingError, TrainingError
from fourfold.words.program import Verb
from tests import local_sgd_oracle
from tests.cases import Case, batches, build_step, local_batch, loss, model, optimizer, train_oracle, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")


def deviation(case: Case, size: int, comm) -> float:
    return oracle.deviation(train_step(case, build_step(case, size, comm)), local_sgd_oracle.train(case, size))


@pytest.mark.parametrize(("size", "hosts", "batch_sizes", "model"), [
    (4, 2, (7, 1, 13, 2, 9, 12, 3, 8, 1), "tied"), (3, 1, (5, 9, 1, 12, 4, 13), "frozen"),
])  # fmt: skip
def test_local_sgd_trains_as_separate_workers_that_average_their_weights(size, hosts, batch_sizes, model):
    # Three local steps per average, and enough averages that the outer momentum accumulates.
    case = Case(model=model, loss="pair", batch_sizes=batch_sizes, sync="local", local_steps=3, outer_momentum=0.9)
    case = dataclasses.replace(case, optimizer="LAMB", microbatches=2, clip=0.05, outer_lr=0.7, bucket_bytes=1500)
    assert max(threads.run(size, lambda comm: deviation(case, size, comm), hosts=hosts)) <= TOLERANCE


def test_a_rank_without_samples_updates_each_bucket_once():
    # All its buckets are updated when the first of them is due.
    case = Case(sync="local", local_steps=1, batch_sizes=(1, 2), bucket_bytes=1, update="in_backward")
    assert max(threads.run(2, lambda comm: deviation(case, 2, comm))) <= TOLERANCE


@settings(max_examples=10)
@given(size=st.integers(1, 4), batch_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
def test_sgd_averaged_in_every_step_equals_data_parallelism(size, batch_sizes):
    # With momentum they differ where batches are uneven, because momentum is local to a rank.
    case = Case(optimizer="descent", batch_sizes=batch_sizes, sync="local", local_steps=1)
    both = threads.run(size, lambda comm: (train_step(case, build_step(case, size, comm)), train_oracle(case)))
    assert max(oracle.deviation(got, expected) for got, expected in both) <= TOLERANCE


LOCAL = Case(sync="local", local_steps=3, batch_sizes=(12, 11, 2, 12, 12, 7), outer_momentum=0.9, bucket_bytes=1500)


def test_ranks_differ_between_averages_and_agree_after_them():
    def body(comm):
        step = build_step(LOCAL, 2, comm)
        seen = []
        for batch in batches(LOCAL):
            metrics = step(local_batch(batch, 2, step.dp_index))
            flat = torch.cat([p.detach().reshape(-1) for p in step.model.parameters()])
            seen.append((metrics.loss, step.is_synchronized, flat))
        return seen

    for (loss_value, is_synchronized, mine), (other_loss, _, theirs) in zip(*threads.run(2, body), strict=True):
        assert loss_value == other_loss
        assert torch.equal(mine, theirs) == is_synchronized


def test_gradients_are_never_reduced_and_weights_only_in_averaging_steps():
    def body(comm):
        step = build_step(LOCAL, 2, comm)
        for batch in batches(LOCAL):
            step(local_batch(batch, 2, step.dp_index))
        return step.program, step._programs.between

    for averaging, local in threads.run(2, body):
        assert {a.verb for a in averaging} - {a.verb for a in local} == {Verb.PUSH, Verb.PULL}
        assert Verb.REDUCE not in {a.verb for a in averaging}


def test_a_state_dict_between_averages_is_refused():
    def body(comm):
        step = build_step(LOCAL, 2, comm)
        step(local_batch(batches(LOCAL)[0], 2, step.dp_index))
        with pytest.raises(TrainingError, match=r"after step 1, with local_steps = 3.*try after step 3"):
            step.state_dict()

    threads.run(2, body)


def test_every_rank_resumes_from_a_loaded_state():
    case = dataclasses.replace(LOCAL, optimizer="descent")

    def body(comm):
        step, resumed = build_step(case, 2, comm), build_step(case, 2, comm)
        parts = [local_batch(batch, 2, step.dp_index) for batch in batches(case)]
        for batch in parts[:3]:
            step(batch)
        resumed.load_state_dict(step.state_dict())
        for batch in parts[3:]:
            step(batch)
            resumed(batch)
        pairs = zip(step.model.parameters(), resumed.model.parameters(), strict=True)
        return [torch.equal(a, b) for a, b in pairs]

    assert all(all(same) for same in threads.run(2, body))


def test_a_bad_step_is_skipped_by_all_ranks_and_its_average_still_happens():
    case = dataclasses.replace(LOCAL, outer_momentum=0.0)

    def body(comm):
        step = TrainStep(
            model(case.model), loss(case), optimizer(case), plan=case.plan(2), communicator=comm, clip=None, skip_nan=3
        )
        skipped = []
        for number, batch in enumerate(batches(case)):
            inputs, targets = local_batch(batch, 2, step.dp_index)
            if number == 2 and comm.rank == 1:
                inputs = inputs * float("nan")
            skipped.append(step((inputs, targets)).skipped is not None)
        return skipped, torch.cat([p.detach().reshape(-1) for p in step.model.parameters()])

    (skipped, mine), (others, theirs) = threads.run(2, body)
    assert skipped == others == [False, False, True, False, False, False]
    assert torch.equal(mine, theirs)
    assert mine.isfinite().all()


def test_show_lists_both_programs_and_the_bytes_sent_per_step():
    shown = {sync: show(Plan(dp=2, sync=sync, local_steps=4), lm.task()) for sync in ("step", "local")}
    local, averaging = (part for part in shown["local"].split("\n\n") if part.startswith("program"))
    assert "R0." not in shown["local"]
    assert "P0." not in local
    assert "in every 4th step" in averaging
    assert "L0.0" in averaging
    sent = {sync: re.search(r"network +([0-9.]+) ([KM])iB", text) for sync, text in shown.items()}
    sizes = {sync: float(found[1]) * {"K": 1, "M": 1024}[found[2]] for sync, found in sent.items() if found}
    assert sizes["local"] == pytest.approx(sizes["step"] / 4, rel=0.01)


class Interrupted(Exception):
    """An error of the loss function during the run."""


def small(stop_at: int | None = None) -> ff.Task:
    """Twenty-four samples; the run fails in step `stop_at`."""
    inputs, targets = batches(Case(batch_sizes=(24,)))[0]
    calls = iter(range(1, 1000))

    def interrupting(outputs: Any, targets: Any) -> Any:
        if outputs.requires_grad and next(calls) == stop_at:
            raise Interrupted
        return loss(Case())(outputs, targets)

    return ff.Task(
        model=lambda: model("mlp"),
        loss=interrupting,
        data=lambda: ff.Data(train=list(zip(inputs, targets, strict=True))),
        optimizer=optimizer(Case()),
    )


def saved(folder: Path) -> dict[TensorKey, torch.Tensor]:
    newest = newest_valid(folder)
    assert newest is not None
    with CheckpointReader(newest) as reader:
        return {tensor: reader.tensor(tensor).read_all() for tensor in reader.entries}


RUN: dict[str, Any] = {"batch_size": 4, "trace_every": 0, "ema": 0.5}


def test_a_run_that_would_end_between_averages_is_refused():
    with pytest.raises(SettingError, match=r"steps = 8, local_steps = 3.*try steps=6 or 9"):
        ff.train(small(), ff.Plan(sync="local", local_steps=3), steps=8, **RUN)


def test_a_run_saves_and_evaluates_at_the_next_average_and_resumes_bit_for_bit(tmp_path):
    plan = ff.Plan(sync="local", local_steps=3, outer_lr=0.7, outer_momentum=0.9)
    options: dict[str, Any] = {"steps": 9, "checkpoint_every": 2, "folder": str(tmp_path), **RUN}
    ff.train(small(), plan, name="whole", **options)
    with pytest.raises(Interrupted):
        ff.train(small(stop_at=8), plan, name="broken", **options)
    assert newest_valid(tmp_path / "broken") == CheckpointStore(tmp_path / "broken").step_dir(6)
    ff.train(small(), plan, name="broken", **options)
    log = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "checkpoint" in line] == [3, 6, 9]
    expected, got = saved(tmp_path / "whole"), saved(tmp_path / "broken")
    kinds = {(tensor.kind.value, tensor.place is None) for tensor in expected}
    assert kinds == {("model", True), ("optimizer", False), ("outer", True), ("ema", True)}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@given(every=st.integers(1, 30), num_averages=st.integers(1, 20), period=st.integers(1, 12))
def test_periodic_actions_run_at_the_next_average_after_they_are_due(every, num_averages, period):
    done = [step for step in range(1, num_averages * period + 1) if is_due(step, every, period)]
    due = range(every, num_averages * period + 1, every)
    assert done == sorted({-(-step // period) * period for step in due})
    assert not any(is_due(step, 0, period) for step in range(20))
