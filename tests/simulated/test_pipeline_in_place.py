"""What a pipeline reads and keeps in place, messages in slots, gradients where autograd puts them, changes no bit."""

import functools

import pytest
import torch

from fourfold.comm import edges
from fourfold.plan import lowering
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(4, 7, 5), length=8)
SCHEDULES = [
    {"schedule": "1f1b", "microbatches": 3},
    {"schedule": "gpipe", "microbatches": 7},
    {"schedule": "interleaved", "interleave": 2, "microbatches": 4},
]
OPTIONS = [{}, {"update": "in_backward"}, {"update": "in_forward"}]


def make_step(comm, fields):
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        model = lm.task(width=16, layers=4, heads=2, length=16, warmup=0).model()
    plan = Plan(pp=2, bucket_bytes=4_000, **fields)
    return TrainStep(model, cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm)


def train(fields, comm):
    """Losses and weights in float32, in which another order of additions shows."""
    step = make_step(comm, fields)
    losses = [step(batch).loss for batch in cases.batches(CASE)]
    return losses, {name: weight.clone() for name, weight in step.named_weights()}


def assert_equal_bits(ours, others):
    for (losses, weights), (other_losses, other_weights) in zip(ours, others, strict=True):
        assert losses == other_losses
        assert weights.keys() == other_weights.keys()
        assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


@pytest.mark.parametrize("fields", SCHEDULES, ids=lambda fields: fields["schedule"])
def test_messages_read_in_place_train_as_copied_ones(fields, monkeypatch):
    body = functools.partial(train, fields)
    in_place = threads.run(2, body)
    for most in (0, 1):  # copied all; lent one
        monkeypatch.setattr(edges, "MAX_LENT", most)
        assert_equal_bits(in_place, threads.run(2, body))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.get("update", "after"))
def test_gradients_of_a_stage_alone_train_as_those_in_buckets(options, monkeypatch):
    body = functools.partial(train, SCHEDULES[0] | options)
    in_place = threads.run(2, body)
    monkeypatch.setattr(lowering, "has_unbucketed_grads", lambda plan: False)
    assert_equal_bits(in_place, threads.run(2, body))
