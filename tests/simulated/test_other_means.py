"""Laws of batches whose parts take different means: they are refused before a weight changes."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fourfold.orders.sample_order import shard_range
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import TaskError
from tests.cases import SEED_LOCK
from tests.simulated.test_later_losses import later
from tests.simulated.test_losses import WIDE, ce, flat, net, part

sgd = functools.partial(torch.optim.SGD, lr=0.1)
DISPROPORTIONATE = "whose counts are not proportional"
REFUSED = f"{DISPROPORTIONATE}|a scalar loss of"


class Heads(nn.Module):
    """Each sample is of one of two tasks, and each task has a head."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x):
        x = torch.tanh(self.trunk(x))
        return [head(x) for head in self.heads]


def heads():
    with SEED_LOCK:
        torch.manual_seed(1)
        return Heads().double()


def by_different_functions(outputs, targets):
    loss, first = sum(each.sum() for each in outputs) * 0, targets["task"] == 0
    if first.any():
        loss = loss + F.cross_entropy(outputs[0][first], targets["class"][first])
    if not first.all():
        loss = loss + F.mse_loss(outputs[1][~first][:, 0], targets["number"][~first])
    return loss


def by_one_function(outputs, targets):
    loss = sum(each.sum() for each in outputs) * 0
    for task, output in enumerate(outputs):
        mine = targets["task"] == task
        if mine.any():
            loss = loss + F.cross_entropy(output[mine], targets["class"][mine])
    return loss


def by_one_head(outputs, targets):
    loss, first = sum(each.sum() for each in outputs) * 0, targets["task"] == 0
    if first.any():
        loss = loss + F.cross_entropy(outputs[0][first], targets["class"][first])
    if not first.all():
        loss = loss + 2 * F.cross_entropy(outputs[0][~first], targets["class"][~first])
    return loss


def own_loss(model):
    """A model that returns its loss."""
    forward = model.forward

    def with_loss(x, **targets):
        return {"loss": by_different_functions(forward(x), targets)}

    model.forward = with_loss
    return model


def of_task(task, samples=4):
    generator = torch.Generator().manual_seed(task)
    inputs = torch.randn(samples, 4, generator=generator, dtype=WIDE)
    return inputs, {
        "task": torch.full((samples,), task),
        "class": torch.arange(samples) % 3,
        "number": torch.randn(samples, generator=generator, dtype=WIDE),
    }


def refused(comm, model, loss, batch, plan):
    step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)
    before = {name: weight.clone() for name, weight in step.named_weights()}
    with pytest.raises(TaskError, match=REFUSED):
        step(batch)
    return all(torch.equal(weight, before[name]) for name, weight in step.named_weights())


PLANS = [Plan(dp=2), Plan(dp=2, microbatches=2, zero=1), Plan(dp=2, zero=3, transport="gloo")]


@pytest.mark.covering
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", [by_different_functions, by_one_function, by_one_head, None])
def test_a_batch_of_one_task_on_each_rank_is_refused(loss, plan):
    def body(comm):
        inputs, targets = of_task(comm.rank)
        if loss is None:
            return refused(comm, own_loss(heads()), None, {"x": inputs} | targets, plan)
        return refused(comm, heads(), loss, (inputs, targets), plan)

    assert all(threads.run(2, body))


class Routed(nn.Module):
    """The batch decides which of two layers is the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x):
        return self.layers[int(x[0, 0] > 0)](x)


def test_ranks_may_use_different_layers_for_the_same_output():
    def body(comm):
        inputs = torch.ones(4, 4, dtype=WIDE) * (1 if comm.rank else -1)
        plan = Plan(dp=2, unused="allow")
        with SEED_LOCK:
            torch.manual_seed(1)
            model = Routed().double()
        step = TrainStep(model, F.cross_entropy, sgd, plan=plan, communicator=comm, clip=None)
        return step((inputs, torch.arange(4) % 3)).loss

    assert len(set(threads.run(2, body))) == 1


def plus_penalty(outputs, targets):
    penalty = 0.1 * outputs.square().mean()
    kept = targets >= 0
    return F.cross_entropy(outputs[kept], targets[kept]) + penalty if kept.any() else penalty


def plus_penalty_by_product(outputs, targets):
    coefficients = torch.full((outputs.numel(),), 0.1 / outputs.numel(), dtype=WIDE)
    kept, penalty = targets >= 0, outputs.square().flatten() @ coefficients
    return F.cross_entropy(outputs[kept], targets[kept]) + penalty if kept.any() else penalty


def used_later(outputs, targets):
    value, metric = ce(*flat(outputs, targets)), F.mse_loss(outputs, torch.zeros_like(outputs))
    return value + metric if (targets < 0).any() else value


@pytest.mark.covering
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", [plus_penalty, plus_penalty_by_product, used_later])
def test_a_part_that_takes_different_means_is_refused_in_a_later_batch(loss, plan):
    def body(comm):
        (inputs, targets), *_ = later()
        uneven_targets = targets.clone()
        uneven_targets[shard_range(0, len(uneven_targets), 2, 1)[0] :] = -100
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        step(part((inputs, targets), 2, comm.rank))
        before = {name: weight.clone() for name, weight in step.named_weights()}
        with pytest.raises(TaskError, match=DISPROPORTIONATE):
            step(part((inputs, uneven_targets), 2, comm.rank))
        return all(torch.equal(weight, before[name]) for name, weight in step.named_weights())

    assert all(threads.run(2, body))
