"""Laws of when buckets are updated."""

import dataclasses
import functools
import threading
import time

import pytest
import torch
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import PlanError
from fourfold.words.program import Verb
from tests import cases, pairs
from tests.cases import Case, batches, build_step, deviation, local_batch, loss, model, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(8, 8, 8, 8), bucket_bytes=1000, optimizer="AdamW")


@pytest.mark.parametrize("fields", pairs.grid(
    size=(2, 3, 1), zero=(1, 2, 0), microbatches=(2, 1), update=("in_backward", "in_forward")
))  # fmt: skip
def test_fused_updates_give_the_weights_of_updates_after_backward_bit_for_bit(fields):
    size, early = fields["size"], dataclasses.replace(CASE, model="tied", batch_sizes=(12, 11, 12, 5))
    early = dataclasses.replace(early, **{name: value for name, value in fields.items() if name != "size"})
    case = dataclasses.replace(early, update="after")
    expected = threads.run(size, lambda comm: train_step(case, build_step(case, size, comm)))
    for got, wanted in zip(
        threads.run(size, lambda comm: train_step(early, build_step(early, size, comm))), expected, strict=True
    ):
        assert got.losses == wanted.losses
        assert all(torch.equal(got.weights[name], weight) for name, weight in wanted.weights.items())


@pytest.mark.parametrize(("zero", "shard"), [(2, None), (3, 2)])
def test_updates_in_backward_between_hosts_do_not_deadlock(zero, shard, monkeypatch):
    monkeypatch.setattr(threads, "TIME_LIMIT_SECONDS", 30.0)
    case = dataclasses.replace(CASE, model="reused", zero=zero, shard=shard, update="in_backward")
    assert max(threads.run(4, lambda comm: deviation(case, 4, comm), hosts=2)) <= TOLERANCE


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 1), (2, 2)])
def test_the_first_buckets_are_updated_during_backward(size, zero):
    case = dataclasses.replace(CASE, zero=zero, update="in_backward")

    def body(comm):
        step, all_launched = build_step(case, size, comm), []
        stage = step._parts.stage
        update = stage.optimizer.update

        def record(bucket, **args):
            all_launched.append(stage.gradients.countdown.num_launched == len(step.buckets))
            update(bucket, **args)

        stage.optimizer.update = record
        step(local_batch(batches(case)[0], size, comm.rank))
        return all_launched

    # At least the rank that launches a bucket last finds its reduction complete.
    assert any(not all_launched for updates in threads.run(size, body) for all_launched in updates)


def test_the_program_shows_updates_after_their_reductions():
    step = threads.run(1, lambda comm: build_step(dataclasses.replace(CASE, update="in_backward"), 1, comm))[0]
    verbs = [a.verb for a in step.program if a.verb in (Verb.REDUCE, Verb.UPDATE)]
    assert verbs == [Verb.REDUCE, Verb.UPDATE] * len(step.buckets)


@pytest.mark.parametrize(("fields", "message"), [
    ({"clip": 1.0}, "the norm of all gradients before"),
    ({"unused": "allow"}, "which parameters have no gradient"),
])  # fmt: skip
def test_updates_in_backward_are_refused_with_clipping_or_unused_parameters(fields, message):
    case = dataclasses.replace(CASE, update="in_backward", **fields)
    model, loss, optimizer = cases.model(case.model), cases.loss(case), cases.optimizer(case)
    with pytest.raises(PlanError, match=message):
        parallelize(model, loss, optimizer, case.plan(1), clip=case.clip)


class Pause(torch.autograd.Function):
    """The identity; its backward calls `act`."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        ctx.act()
        return gradients[0], None


class Detached(torch.nn.Module):
    """Its last weight is used once more, early and without a gradient: backward reads it again at its end."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.at_begin = self.at_end = lambda: None

    def forward(self, x):
        x = torch.nn.functional.linear(self.first(x), self.last.weight.detach())
        return Pause.apply(self.last(torch.tanh(Pause.apply(x, self.at_end))), self.at_begin)


def train_detached(comm, zero, update, *, ready):
    """A step in which rank 1 reads its last weight after rank 0 could update it; whether it read the old value."""
    model = Detached().double()
    make = functools.partial(torch.optim.SGD, lr=0.1)
    plan = Plan(dp=2, zero=zero, update=update, bucket_bytes=1)
    step = TrainStep(model, lambda out, _: out.square(), make, plan=plan, communicator=comm, clip=None)
    before, same = model.last.weight.detach().clone(), []

    def at_end():
        ready.set()
        end = time.monotonic() + 0.5
        while time.monotonic() < end and torch.equal(before, model.last.weight):
            time.sleep(0.01)
        same.append(torch.equal(before, model.last.weight))

    batch = torch.ones(3, 16, dtype=torch.float64), torch.zeros(3)
    if comm.rank == 0:
        model.at_begin = lambda: ready.wait(5)
    else:
        model.at_end = at_end
    step(batch)
    return same


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_no_backward_computes_with_weights_that_another_rank_has_updated(zero):
    ready = threading.Event()
    assert threads.run(2, lambda comm: train_detached(comm, zero, "after", ready=ready))[1] == [True]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_update_in_backward_of_a_weight_that_backward_still_needs_raises_on_every_rank(zero):
    ready, raised = threading.Event(), [threading.Event(), threading.Event()]

    def body(comm):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train_detached(comm, zero, "in_backward", ready=ready)
        raised[comm.rank].set()
        assert raised[1 - comm.rank].wait(5)

    threads.run(2, body)


def two_groups(parameters):
    """Nesterov momentum in one of two groups; updates with foreach=True."""
    parameters = list(parameters)
    first, second = parameters[0::2], parameters[1::2]
    groups = [{"params": first, "momentum": 0.9, "nesterov": True}, {"params": second}]
    return torch.optim.SGD(groups, lr=0.1, foreach=True)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_reduced_gradients_that_other_ranks_read_are_not_overwritten(microbatches):
    case = Case(batch_sizes=(12, 12, 12, 12), bucket_bytes=1500, microbatches=microbatches)

    def body(comm):
        step = TrainStep(model("mlp"), loss(case), two_groups, plan=case.plan(comm.size), communicator=comm, clip=None)
        return train_step(case, step)

    expected = oracle.train(model("mlp"), loss(case), two_groups, batches(case))
    assert max(oracle.deviation(got, expected) for got in threads.run(4, body)) <= oracle.TOLERANCE


class SlowForward(nn.Sequential):
    seconds = 0.0

    def forward(self, input):
        time.sleep(self.seconds)
        return super().forward(input)


def test_a_rank_without_samples_does_not_wait_for_totals_while_backwards_wait_for_its_sums(monkeypatch):
    """Rank 3's backward waits for a sum with rank 1 before it can learn that rank 2 has begun the totals."""
    monkeypatch.setattr(threads, "TIME_LIMIT_SECONDS", 20.0)

    def body(comm):
        num_samples = 0 if comm.rank == 1 else 2
        batch = torch.full((num_samples, 4), comm.rank + 1.0), torch.zeros(num_samples)
        layers = SlowForward(*[nn.Linear(4, 4, bias=False) for _ in range(6)])
        plan = Plan(dp=4, zero=3, shard=2, update="in_backward", bucket_bytes=1)
        step = TrainStep(
            layers, lambda outputs, _: outputs.sum(1), torch.optim.SGD, plan=plan, communicator=comm, clip=None
        )
        step(batch)
        layers.seconds = 0.5 if comm.rank in (0, 2) else 0.0
        return step(batch).loss

    assert len(set(threads.run(4, body, hosts=2))) == 1
