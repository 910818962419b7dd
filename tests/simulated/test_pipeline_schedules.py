"""Synchronous schedules train alike: each adds the gradients of microbatches in one order, so in float32 to the bit."""

import functools

import pytest
import torch

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(8, 7, 5), length=8)
OTHERS = ({"schedule": "gpipe"}, {"schedule": "zero-bubble"}, {"schedule": "interleaved", "interleave": 2})


def train(fields, comm):
    """Losses by step, and weights by name, in float32, in which another order of additions shows."""
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        model = lm.task(width=16, layers=4, heads=2, length=8, warmup=0).model()
    plan = Plan(pp=2, dp=2, microbatches=4, zero=1, bucket_bytes=4_000, **fields)
    step = TrainStep(model, cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm)
    losses = [step(cases.local_batch(batch, 2, step.dp_index)).loss for batch in cases.batches(CASE)]
    return losses, {name: weight.clone() for name, weight in step.named_weights()}


@functools.cache
def by_1f1b():
    return threads.run(4, functools.partial(train, {"schedule": "1f1b"}))


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: fields["schedule"])
def test_synchronous_schedules_train_to_the_same_bits(fields):
    for (losses, weights), (expected_losses, expected) in zip(
        threads.run(4, functools.partial(train, fields)), by_1f1b(), strict=True
    ):
        assert losses == expected_losses
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
