"""Laws of mixed precision: two-byte computation, the update's own weights, sums in a dtype of choice."""

import dataclasses

import pytest
import torch

from fourfold.run.build import TrainStep
from fourfold.testing import oracle, threads
from tests import training
from tests.training import Case, batches, local

CASE = Case(precision="bf16", batch_sizes=(12, 12, 12, 12), bucket_bytes=1000)

# torch's fused kernels round the last elements of a tensor otherwise than the others: which those are depends on where
# a parameter lies.
HOW = {"foreach": True}


def by_hand(case, *, dtype=torch.bfloat16, model=None):
    """One process, as one would write it: a rounded copy computes, torch.optim updates the float32 weights."""
    masters = (model or training.model(case.model)).float()
    working = training.model(case.model).to(dtype)
    optimizer = training.optimizer(case, **HOW)(masters.parameters())
    loss = training.loss(case)
    losses, norms = [], []
    for inputs, targets in batches(case):
        with torch.no_grad():
            for low, high in zip(working.parameters(), masters.parameters(), strict=True):
                low.copy_(high)
        parts = [loss(working(x.to(dtype)).float(), y) for x, y in _cut(inputs, targets, case.microbatches)]
        mean = sum(part.sum() for part in parts) / len(targets)
        for part in parts:
            (part.sum() / len(targets)).backward()
        for low, high in zip(working.parameters(), masters.parameters(), strict=True):
            high.grad, low.grad = None if low.grad is None else low.grad.float(), None
        if case.clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(masters.parameters(), case.clip).item())
        optimizer.step()
        losses.append(mean.item())
    return oracle.snapshot(masters, losses, norms or [None] * len(losses))


def _cut(inputs, targets, count):
    return zip(inputs.chunk(count), targets.chunk(count), strict=True)


def masters_after(case, step):
    """Losses and precise weights of a training on this rank."""
    size, index = step.plan.dp, step.data_index
    metrics = [step(local(batch, size, index)) for batch in batches(case)]
    weights = step.state_dict()["model"]
    return oracle.Trained([m.loss for m in metrics], [m.grad_norm for m in metrics], weights)


def make(case, size, ranks):
    model, loss, optimizer = training.model(case.model).float(), training.loss(case), training.optimizer(case, **HOW)
    return TrainStep(model, loss, optimizer, plan=case.plan(size), ranks=ranks, clip=case.clip)


def run(case, size):
    return threads.run(size, lambda ranks: masters_after(case, make(case, size, ranks)))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
def test_one_rank_trains_as_a_rounded_copy_beside_float32_weights_does_bit_for_bit(optimizer, microbatches):
    case = dataclasses.replace(CASE, optimizer=optimizer, microbatches=microbatches)
    (got,) = run(case, 1)
    expected = by_hand(case)
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, weight in expected.weights.items():
        assert got.weights[name].dtype == torch.float32
        assert torch.equal(got.weights[name], weight), name
