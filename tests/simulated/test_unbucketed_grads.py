"""Laws of a single rank, whose gradients stay in the tensors that autograd makes."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE, deviation
from fourfold.words.errors import TaskError, TrainingError
from tests import cases
from tests.cases import LOSSES, Case, batches, train_oracle, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(8, 8), bucket_bytes=1)
UPDATES = ["after", "in_backward"]
BATCH = torch.ones(2, 16), torch.zeros(2, dtype=torch.int64)


def on_one_rank(case, *, skip_nan=0):
    """The case's step on a single rank."""
    model, loss, optimizer = cases.model(case.model), cases.loss(case), cases.optimizer(case)
    make = functools.partial(TrainStep, plan=case.plan(1), clip=case.clip, skip_nan=skip_nan)
    return threads.run(1, lambda comm: make(model, loss, optimizer, communicator=comm))[0]


def track_peak(step):
    """Track the peak number of gradient elements that exist at once; returns a list with this number."""
    parameters, peak = list(step.model.parameters()), [0]

    def update_peak(_):
        peak[0] = max(peak[0], sum(p.grad.numel() for p in parameters if p.grad is not None))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(update_peak)
        parameter.register_hook(update_peak)
    return peak


@pytest.mark.parametrize("update", UPDATES)
def test_updates_in_backward_hold_one_gradient_at_a_time_and_updates_after_backward_all(update):
    step = on_one_rank(dataclasses.replace(CASE, update=update))
    peak = track_peak(step)
    sizes = [p.numel() for p in step.model.parameters()]
    for number, batch in enumerate(batches(CASE)):
        step(batch)
        assert all(p.grad is None for p in step.model.parameters())
        if number == 0:
            peak[0] = 0  # the first step uses gradients in the order of buckets, later ones in the order of backward
    assert peak[0] == sum(sizes) if update == "after" else peak[0] <= max(sizes)
    assert not step._parts.stage.reducer.grad_buffers
    assert all(piece.weight.grad is None for pieces in step._parts.stage.optimizer._slices for piece in pieces)


@pytest.mark.parametrize("update", UPDATES)
def test_a_bad_step_frees_its_gradients_and_changes_no_weight(update):
    step = on_one_rank(dataclasses.replace(CASE, update=update), skip_nan=1)
    (first, _), peak = batches(CASE), track_peak(step)
    step(first)
    before, peak[0] = [p.detach().clone() for p in step.model.parameters()], 0
    assert step((first[0] * float("nan"), first[1])).skipped is not None
    assert all(map(torch.equal, before, step.model.parameters()))
    assert all(p.grad is None for p in step.model.parameters())
    assert update == "after" or peak[0] <= max(p.numel() for p in before)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gradient_with_other_strides_than_its_parameter_is_read_correctly(update, microbatches):
    case = dataclasses.replace(CASE, update=update, microbatches=microbatches, batch_sizes=(8, 7, 8))
    step = on_one_rank(case)
    for parameter in step.model.parameters():
        if parameter.ndim == 2:
            parameter.register_hook(lambda gradient: gradient.t().contiguous().t())
    assert deviation(train_step(case, step), train_oracle(case)) <= TOLERANCE


class Odd(nn.Module):
    """Two layers; `kind` says how the first is used."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.head = kind, nn.Linear(16, 16), nn.Linear(16, 10)
        self.table = nn.Embedding(4, 16, sparse=True)

    def forward(self, x):
        if self.kind == "twice":
            for _ in range(2):
                x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        if self.kind == "sparse":
            x = x + self.table(torch.zeros(len(x), dtype=torch.int64))
        return self.head(x)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("kind", "error", "message"), [
    ("twice", TaskError, r"two gradients of layer\.\w+ in one backward"),
    ("sparse", TaskError, r"table\.weight has a sparse gradient"),
    ("unused", TrainingError, r"parameter layer\.weight got no gradient"),
])  # fmt: skip
def test_gradients_that_cannot_be_used_are_refused_by_name(kind, error, message, update):
    def body(comm):
        plan = Plan(update=update, bucket_bytes=1)
        step = TrainStep(Odd(kind), LOSSES["values"], torch.optim.SGD, plan=plan, communicator=comm, clip=None)
        step(BATCH)

    with pytest.raises(error, match=message):
        threads.run(1, body)


class Spare(nn.Module):
    """A layer, and another one for even or odd numbers of samples."""

    def __init__(self, parity):
        super().__init__()
        self.parity = parity
        self.layer, self.spare = nn.Linear(16, 10).double(), nn.Linear(16, 10).double()

    def forward(self, x):
        return self.layer(x) + (self.spare(x) if len(x) % 2 == self.parity else 0)


@pytest.mark.parametrize("update", ["after", "in_forward"])
@pytest.mark.parametrize("parity", [0, 1])  # the first microbatch uses the spare layer, or the last one
def test_a_hook_has_the_gradient_of_one_microbatch(update, parity):
    torch.manual_seed(1)
    sizes = (2, 3)
    model, generator = Spare(parity), torch.Generator().manual_seed(2)
    inputs = torch.randn(sum(sizes), 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 10, (sum(sizes),), generator=generator)
    losses = functools.partial(torch.nn.functional.cross_entropy, reduction="none")
    for x, y in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        losses(model(x), y).sum().backward()
    expected = [p.detach() - 0.5 * (0 if p.grad is None else p.grad) / sum(sizes) for p in model.parameters()]
    model.zero_grad()
    plan = Plan(microbatches=2, update=update, unused="allow", bucket_bytes=1)
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    make = functools.partial(TrainStep, model, losses, sgd, plan=plan, clip=None)
    step = threads.run(1, lambda comm: make(communicator=comm))[0]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 0.5 * p.grad))
    step((inputs, targets))
    step.flush()
    assert all(map(torch.allclose, model.parameters(), expected))


class WithLocalLoss(nn.Module):
    """Trains its first layer by a loss of its own, in forward; the other loss does not reach it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.training and torch.is_grad_enabled():
            x.pow(2).sum().mul(1 / 8).backward()
        return self.second(x.detach())


def local_loss_training(num_ranks, plan):
    """The weights after three steps, on each rank."""
    loss = nn.MSELoss(reduction="none")

    def train(comm):
        model = WithLocalLoss()
        optimizer = functools.partial(torch.optim.SGD, lr=0.3)
        step = TrainStep(model, loss, optimizer, plan=plan, communicator=comm)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            step([torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (4, 3)])
        step.flush()
        return [p.detach().clone() for p in model.parameters()]

    return threads.run(num_ranks, train)[0]


@pytest.mark.parametrize(
    ("update", "unused"), [("after", "error"), ("after", "allow"), ("in_backward", "error"), ("in_forward", "allow")]
)
def test_a_backward_within_forward_gives_gradients_as_on_one_device(update, unused):
    model, loss = WithLocalLoss(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (4, 3))
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    found = local_loss_training(1, Plan(update=update, unused=unused))
    torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(dp=2, zero=3), Plan(microbatches=2)], ids=str)
def test_a_backward_within_forward_is_refused_where_the_batch_is_split(plan):
    with pytest.raises(TrainingError, match=r"a backward\(\) within forward, which gives first"):
        local_loss_training(plan.dp, dataclasses.replace(plan, unused="allow"))
