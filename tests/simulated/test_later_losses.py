"""Laws of losses whose error only a later batch would show: refused at once, or before that batch changes a weight."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fourfold.feed.source import TensorSource
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.trainer.evaluate import evaluate
from fourfold.words.errors import TaskError
from fourfold.words.task import Data, Task
from tests.simulated.test_losses import (
    SPLITS,
    WIDE,
    batches,
    ce,
    flat,
    in_turn,
    net,
    part,
    sgd,
    train_in_one_process,
    trained,
)

LATER = {
    "plus a mean by hand": lambda o, y: ce(*flat(o, y)) + o.square().mean(),
    "plus a mean of torch's": lambda o, y: ce(*flat(o, y)) + 0.1 * F.mse_loss(o, torch.zeros_like(o)),
}
BY_HAND = {
    "half a sum divided by those kept": lambda o, y: (
        0.5 * ce(*flat(o, y), reduction="sum") / (y >= 0).sum().clamp(min=1)
    ),
    "a masked mean": lambda o, y: (o.square().sum(-1) * (y >= 0)).sum() / (y >= 0).sum(),
    "a masked mean of at least one": lambda o, y: (o.exp().sum(-1) * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
    "a masked mean as a ratio of means": lambda o, y: (o.exp().sum(-1) * (y >= 0)).mean() / (y >= 0).double().mean(),
    "a mean of those kept": lambda o, y: o[y >= 0].square().mean() if (y >= 0).any() else 0 * o.sum(),
    "chunks": lambda o, y: sum(ce(*each, reduction="sum") for each in chunks(o, y)) / (y >= 0).sum().clamp(min=1),
    "smoothed by hand": lambda o, y: smoothed(o, y),
    "a masked mean by a product": lambda o, y: (o.square().mean(-1) * ((y >= 0) * (1 / (y >= 0).sum().double()))).sum(),
    "without zeros": lambda o, y: (o.square().sum(-1) * (y != 0)).sum() / (y != 0).sum(),
    "several": lambda o, y: torch.stack([(o.exp().sum(-1) * (y >= 0)).sum() / (y >= 0).sum() / 2, o.mean()]).sum(),
}


def chunks(o, y):
    return zip(*(each.chunk(3) for each in flat(o, y)), strict=True)


def smoothed(o, y):
    """Label smoothing as in transformers."""
    logs, ignored, y = -o.log_softmax(-1), (y < 0)[..., None], y.clamp(min=0)[..., None]
    sums = logs.gather(-1, y).masked_fill(ignored, 0.0), logs.sum(-1, keepdim=True).masked_fill(ignored, 0.0)
    count = ignored.numel() - ignored.sum()
    return 0.9 * sums[0].sum() / count + 0.1 * sums[1].sum() / (count * o.shape[-1])


def without_grad(o, y):
    with torch.no_grad():
        F.mse_loss(o, torch.zeros_like(o))
    return ce(*flat(o, y))


EXACT = {
    "a sum divided by all targets": lambda o, y: ce(*flat(o, y), reduction="sum") / y.numel(),
    "a sum divided by samples": lambda o, y: ce(*flat(o, y), reduction="sum") / len(y),
    "a third of a sum divided by samples": lambda o, y: ce(*flat(o, y), reduction="sum") / (3 * len(y)),
    "a metric within no_grad": without_grad,
    "plus a constant": lambda o, y: 0.3 * ce(*flat(o, y)) + own_penalty.square(),
    "half of two means": lambda o, y: (ce(*flat(o, y)) + ce(*flat(o.sin(), y))) / 2,
    "a mean of each sample": lambda o, y: o.square().flatten(1).mean(1).mean(),
    "plus a mean of constants": lambda o, y: ce(*flat(o, y)) / 3 + own_penalty.expand(7).mean() / 5,
    "a mean by lengths": lambda o, y: (o.square().sum((1, 2)) / (1 + (y >= 0).sum(1))).mean(),
    "a metric before, not detached": lambda o, y: log_metric(F.l1_loss(o, torch.zeros_like(o)), ce(*flat(o, y))),
    "a metric after, not detached": lambda o, y: log_metric(F.l1_loss(o, o + 1), ce(*flat(o, y))),
    "by torch.func.vmap": lambda o, y: torch.func.vmap(ce)(o.flatten(1), y.abs().sum(1) % 20).mean(),
    "elements by torch.func.vmap": lambda o, y: torch.func.vmap(F.mse_loss)(o, o.sin().detach()).mean(),
}


def log_metric(metric, value):
    assert metric.item() >= 0
    return value


own_penalty = torch.tensor(1.5, dtype=WIDE)
SHARDED = [(2, 2, 3)]  # with sharded weights, autograd saves other tensors


def ignoring():
    """All targets of a rank's first samples are ignored."""
    found = []
    for inputs, targets in batches():
        ignored = targets.clone()
        ignored[:3] = ignored[7:9] = -100
        found.append((inputs, ignored))
    return found


def later():
    """A first batch without ignored targets, then batches with an uneven number of them."""
    (inputs, targets), *others = batches()
    return [(inputs, targets.clamp(min=0)), *others]


def refused_after(step, given, dp, match):
    step(part(given[0], dp, step.dp_index))
    before = {name: weight.clone() for name, weight in step.named_weights()}
    with pytest.raises(TaskError, match=match):
        step(part(given[1], dp, step.dp_index))
    return all(torch.equal(weight, before[name]) for name, weight in step.named_weights())


@pytest.mark.parametrize(("name", "split"), in_turn(LATER, SPLITS + SHARDED))
def test_a_loss_of_several_means_is_refused_once_their_counts_are_uneven(name, split):
    def body(comm):
        transport = "gloo" if split[2] == 3 else "auto"
        plan = Plan(dp=split[0], microbatches=split[1], zero=split[2], transport=transport)
        step = TrainStep(net(), LATER[name], sgd, plan=plan, communicator=comm, clip=None)
        return refused_after(step, later(), split[0], "whose counts are not proportional")

    assert all(threads.run(split[0], body))


def test_a_later_part_with_none_of_the_means_that_are_counted_is_refused_and_not_dropped():
    def loss(o, y):
        return F.mse_loss(o, y) if (y < 7).all() else (o - y).square().sum() / 3

    def body(comm):
        inputs = torch.linspace(-1, 1, 12, dtype=WIDE).view(4, 3)
        model = nn.Linear(3, 3, dtype=WIDE)
        step = TrainStep(model, loss, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        given = [(inputs, inputs.cos()), (inputs, inputs.cos() + 9 * (inputs > 0.9))]
        return refused_after(step, given, 2, "whose counts are not proportional")

    assert all(threads.run(2, body))


@pytest.mark.parametrize("name", LATER)
def test_the_same_losses_train_as_in_one_process_while_no_target_is_ignored(name):
    given = [(inputs, targets.clamp(min=0)) for inputs, targets in batches()]
    got = threads.run(3, lambda comm: trained(comm, LATER[name], (3, 2, 0), given))
    assert max(oracle.deviation(each, train_in_one_process(LATER[name], given)) for each in got) <= TOLERANCE


@pytest.mark.parametrize(("name", "split"), in_turn(BY_HAND, SPLITS + SHARDED))
def test_a_mean_by_hand_that_may_leave_out_targets_is_refused_before_any_is_left_out(name, split):
    inputs, targets = later()[0]
    given = inputs, targets.clamp(min=1)  # nothing that a loss leaves out

    def body(comm):
        transport = "gloo" if split[2] == 3 else "auto"
        plan = Plan(dp=split[0], microbatches=split[1], zero=split[2], transport=transport)
        step = TrainStep(net(), BY_HAND[name], sgd, plan=plan, communicator=comm, clip=None)
        with pytest.raises(TaskError, match=r"a scalar loss .* among the targets") as caught:
            step(part(given, split[0], step.dp_index))
        assert "try return (sum, count)" in str(caught.value)

    threads.run(split[0], body)


@pytest.mark.covering
@pytest.mark.parametrize("given", [later, ignoring])
@pytest.mark.parametrize(("name", "split"), in_turn(EXACT, SPLITS))
def test_losses_that_stay_exact_when_some_targets_are_ignored_are_not_refused(name, split, given):
    expected = train_in_one_process(EXACT[name], given())
    got = threads.run(split[0], lambda comm: trained(comm, EXACT[name], split, given()))
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


def refused_at_once(loss, match, dp=2, **options):
    def body(comm):
        step = TrainStep(net(), loss(), sgd, plan=Plan(dp=dp, **options), communicator=comm, clip=None)
        with pytest.raises(TaskError, match=match):
            step(part(batches()[0], dp, step.dp_index))

    threads.run(dp, body)


COUNTS = {
    "a second loss": (lambda o, y: (ce(*flat(o, y)), o.square().mean()), "whose count requires a gradient"),
    "infinite": (lambda o, y: (o.square().sum(), float("inf")), "count = inf"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_an_invalid_count_is_refused(name):
    loss, match = COUNTS[name]
    refused_at_once(lambda: loss, match)


class Centred(nn.Module):
    """Unreduced: the distance of each sample from a moving average of all samples before it."""

    centre: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5, dtype=WIDE))

    def forward(self, o, y):
        values = (o - self.centre).square().mean((1, 2))
        self.centre.mul_(0.9).add_(0.1 * o.detach().mean((0, 1)))
        return values


class Counting(nn.Module):
    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=WIDE))

    def forward(self, o, y):
        self.calls += 1
        return o.square().mean((1, 2)) / self.calls


class Caching(nn.Module):
    """Makes its class weights in the first call; every call gives the same ones."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, o, y):
        if self.scale is None:
            self.scale = torch.arange(1, o.shape[-1] + 1, dtype=o.dtype)
        return (o * self.scale).square().mean((1, 2))


def as_lambda(module):
    return lambda o, y: module(o, y)


@pytest.mark.parametrize("held", [lambda module: module, as_lambda, lambda module: module.forward])
@pytest.mark.parametrize("kind", [Centred, Counting])
def test_a_loss_that_writes_its_own_buffers_is_refused_where_a_batch_is_split(kind, held):
    refused_at_once(lambda: held(kind()), "the loss writes its own (centre|calls) each time")


def test_a_loss_that_caches_is_trained_and_one_process_may_keep_loss_state():
    got = threads.run(2, lambda comm: trained(comm, Caching(), (2, 2, 0), batches()))
    expected = train_in_one_process(lambda o, y: Caching()(o, y).mean(), batches())
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE
    assert threads.run(1, lambda comm: trained(comm, Centred(), (1, 1, 0), batches()))


def plus_unmasked_mean(o, y):
    return ce(*flat(o, y)) + F.mse_loss(o, torch.zeros_like(o))


@pytest.mark.parametrize("loss", [plus_unmasked_mean, LATER["plus a mean by hand"]])
def test_an_evaluation_of_a_source_refuses_disproportionate_counts(loss):
    inputs, targets = batches()[0]
    targets = targets.clamp(min=0)
    targets[3:5] = targets[11:] = -100  # not among the samples of the dry run
    source = TensorSource(inputs, targets)
    task = Task(model=net, loss=loss, data=lambda: Data(train=source), optimizer=sgd)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        with pytest.raises(TaskError, match="whose counts are not proportional"):
            evaluate(step, task, source, 4)

    threads.run(2, body)


class Field(nn.Module):
    """Returns values and the points at which they are taken; the loss differentiates by the points, as in a PINN."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        x = x.detach().requires_grad_()
        return self.net(x).sum(-1), x


def equation(outputs, targets):
    value, point = outputs
    (slope,) = torch.autograd.grad(value.sum(), point, create_graph=True)
    return (slope.square().sum(-1) - value).square().mean()


@pytest.mark.parametrize("split", SPLITS)
def test_a_loss_may_differentiate_outputs_by_one_another(split):
    def train(comm, dp, **options):
        step = TrainStep(Field(), equation, sgd, plan=Plan(dp=dp, **options), communicator=comm, clip=None)
        metrics = [step(part(batch, dp, step.dp_index)).loss for batch in batches()]
        return oracle.snapshot(step, metrics, [])

    (expected,) = threads.run(1, lambda comm: train(comm, 1))
    got = threads.run(split[0], lambda comm: train(comm, split[0], microbatches=split[1], zero=split[2]))
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


class Weighted(nn.Module):
    """Returns, besides its outputs, weights of the terms of the loss: as many as a microbatch has samples, or 4."""

    def __init__(self, count):
        super().__init__()
        self.net, self.weights = net(), nn.Parameter(torch.zeros(count, dtype=WIDE))

    def forward(self, x):
        return self.net(x), self.weights


def weighted(outputs, targets):
    (outputs, weights), terms = outputs, range(len(outputs[1]))
    return sum(weights[k].exp() * F.mse_loss(outputs[..., k], targets.cos()) for k in terms) + weights[0]


@pytest.mark.parametrize("count", [2, 4])
def test_outputs_that_are_not_of_samples_may_be_as_many_as_samples(count):
    def train(comm, dp, **options):
        step = TrainStep(Weighted(count), weighted, sgd, plan=Plan(dp=dp, **options), communicator=comm, clip=None)
        metrics = [step(part(batch, dp, step.dp_index)).loss for batch in given]
        return oracle.snapshot(step, metrics, [])

    given = [(inputs[:8], targets[:8]) for inputs, targets in batches()]
    (expected,) = threads.run(1, lambda comm: train(comm, 1))
    got = threads.run(2, lambda comm: train(comm, 2, microbatches=2))
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


BY_SAMPLES = {
    "the largest two": lambda o, y: ce(o[:, 0], y[:, 0].clamp(min=0), reduction="none").topk(2)[0].mean(),
    "balanced in the batch": lambda o, y: (
        ce(o[:, 0], (y := y[:, 0].clamp(min=0)), reduction="none") / torch.bincount(y)[y]
    ).mean(),
}


@pytest.mark.parametrize("name", BY_SAMPLES)
def test_a_mean_that_depends_on_which_samples_there_are_is_refused_where_the_first_ones_hide_it(name):
    inputs, targets = batches()[0]
    targets = torch.arange(3)[:, None].expand(3, targets.shape[1])  # of different classes, and too few to cut in two
    given = inputs[:3], targets

    def body(comm):
        step = TrainStep(net(), BY_SAMPLES[name], sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        with pytest.raises(TaskError, match="a scalar loss of"):
            step((given[0] + comm.rank, given[1]))

    threads.run(2, body)


@pytest.mark.parametrize("first", ["values", "pair"])
def test_a_scalar_of_a_later_batch_is_refused_where_the_first_loss_was_none(first):
    later = list[bool]()

    def loss(o, y):
        values = ce(*flat(o, y), reduction="none")
        if later:
            return values.sum()
        return values if first == "values" else (values.sum(), values.numel())

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=Plan(microbatches=2), communicator=comm, clip=None)
        before, after = batches()[:2]
        step(before)
        step.evaluate(before)
        later.append(True)
        with pytest.raises(
            TaskError, match=r"a scalar loss, where the first batch had unreduced values or a pair \(sum, count\)"
        ):
            step(after)

    threads.run(1, body)
