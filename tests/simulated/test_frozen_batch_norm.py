"""Laws of batch normalization with frozen statistics: trained on every mesh as on one device."""

import pytest
import torch
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.model_checks import check_plan_for_model
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import DivergenceError, PlanError, TaskError
from tests.cases import SEED_LOCK
from tests.classification import batches, local_batch, loss, sgd

PLANS = [Plan(dp=2), Plan(microbatches=2), Plan(dp=2, microbatches=2), Plan(dp=2, zero=2)]


class Net(nn.Module):
    def __init__(self, *, keeps_frozen: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.keeps_frozen = keeps_frozen

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        if self.keeps_frozen:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def net(*, keeps_frozen: bool = False) -> Net:
    """A net with frozen statistics that are not those of any batch."""
    with SEED_LOCK:
        torch.manual_seed(3)
        model = Net(keeps_frozen=keeps_frozen).double()
    for buffer in (model.norm.running_mean, model.norm.running_var):
        assert buffer is not None
        buffer += torch.linspace(0.1, 0.8, 8)
    model.train()
    model.norm.eval()
    return model


@pytest.mark.parametrize("plan", PLANS)
def test_frozen_statistics_train_as_on_one_device(plan):
    given = batches(9, 7, 9)
    expected = oracle.train(net(keeps_frozen=True), loss, sgd, given)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        metrics = [step(local_batch(batch, plan, step.dp_index)) for batch in given]
        step.evaluate(local_batch(given[0], plan, step.dp_index))
        assert torch.equal(step.model.get_buffer("norm.running_mean"), net().get_buffer("norm.running_mean"))
        return oracle.snapshot(step, [m.loss for m in metrics], [])

    check_plan_for_model(net(), plan, clip=None)
    assert max(oracle.deviation(got, expected) for got in threads.run(plan.dp, body)) <= TOLERANCE


@pytest.mark.parametrize("plan", PLANS)
def test_batch_statistics_are_refused(plan):
    unfrozen, untracked = net(), net()
    unfrozen.norm.train()
    untracked.norm = nn.BatchNorm1d(8, track_running_stats=False).double().eval()
    for model in (unfrozen, untracked):
        with pytest.raises(PlanError, match="batch normalization at norm"):
            check_plan_for_model(model, plan, clip=None)
    for model in (unfrozen, untracked):
        check_plan_for_model(model, Plan(), clip=None)


@pytest.mark.parametrize("plan", PLANS)
def test_unfrozen_statistics_are_refused_before_a_weight_changes(plan):
    (batch,) = batches(9)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        step(local_batch(batch, plan, step.dp_index))
        step.model.train()
        with pytest.raises(TaskError, match="batch normalization at norm in training mode"):
            step(local_batch(batch, plan, step.dp_index))
        step.model.get_submodule("norm").eval()
        return step(local_batch(batch, plan, step.dp_index)).loss

    assert len(set(threads.run(plan.dp, body))) == 1


@pytest.mark.parametrize("plan", [Plan(), Plan(dp=2, batch_norm="local")])
def test_statistics_may_be_unfrozen_where_a_whole_batch_or_the_plan_allows_it(plan):
    (batch,) = batches(9)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        step(local_batch(batch, plan, step.dp_index))
        before = step.model.get_buffer("norm.running_mean").clone()
        step.model.train()
        step(local_batch(batch, plan, step.dp_index))
        return torch.equal(step.model.get_buffer("norm.running_mean"), before)

    assert not any(threads.run(plan.dp, body))


def test_a_model_may_keep_its_statistics_frozen_in_train_mode():
    (batch,), plan = batches(9), Plan(dp=2)

    def body(comm):
        step = TrainStep(net(keeps_frozen=True), loss, sgd, plan=plan, communicator=comm, clip=None)
        losses = []
        for _ in range(3):
            step.model.train()
            losses.append(step(local_batch(batch, plan, step.dp_index)).loss)
        return oracle.snapshot(step, losses, [])

    expected = oracle.train(net(keeps_frozen=True), loss, sgd, [batch] * 3)
    assert max(oracle.deviation(got, expected) for got in threads.run(2, body)) <= TOLERANCE


class Unfreezing(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(self.training)
        return super().forward(x)


@pytest.mark.parametrize("plan", PLANS[:3])
def test_statistics_unfrozen_by_forward_are_refused(plan):
    def body(comm):
        model = Unfreezing().double()
        model.norm.eval()
        step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)
        with pytest.raises(TaskError, match="forward writes norm"):
            step(local_batch(batches(24)[0], plan, step.dp_index))

    threads.run(plan.dp, body)


def test_a_rank_that_unfreezes_its_statistics_is_reported_without_deadlock():
    (batch,), plan = batches(9), Plan(dp=2)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        step(local_batch(batch, plan, step.dp_index))
        step.model.train(comm.rank == 1)
        with pytest.raises((TaskError, DivergenceError), match=r"batch normalization at norm in training mode|step 2"):
            step(local_batch(batch, plan, step.dp_index))

    threads.run(2, body)


def test_a_distributed_optimizer_trains_frozen_statistics_and_refuses_unfrozen_ones():
    (batch,), plan = batches(9), Plan(dp=2)

    def body(comm):
        model = net()
        optimizer = DistributedOptimizer(sgd(model.parameters()), model, plan, communicator=comm)
        inputs, targets = local_batch(batch, plan, comm.rank)

        def backward():
            loss(model(inputs), targets).mean().backward()

        backward()
        optimizer.step()
        model.train()
        backward()
        weights = [p.clone() for p in model.parameters()]
        with pytest.raises(TaskError, match="batch normalization at norm in training mode"):
            optimizer.step()
        return all(map(torch.equal, weights, model.parameters()))

    assert all(threads.run(2, body))
