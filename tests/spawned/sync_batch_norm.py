"""What the ranks of a spawned world do with batch_norm = "sync". Results are JSON."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.feed.source import TensorSource
from fourfold.plan.plan import Plan
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.parallelize import parallelize
from fourfold.testing import oracle
from fourfold.verification.command import verify
from fourfold.words.errors import DivergenceError
from fourfold.words.task import Data, Task
from tests.classification import batches, local_batch, loss, sgd
from tests.spawned.rank_functions import fake_hosts


class Net(nn.Module):
    """Two norms, one of them so wide that it takes two messages. `is_wayward`: the narrow one comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Linear(8, 300), nn.BatchNorm1d(300), nn.BatchNorm1d(3)
        self.second, self.is_wayward = nn.Linear(300, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_wayward:
            return self.narrow(self.second(x)) + self.second(self.wide(x))
        return self.narrow(self.second(torch.tanh(self.wide(x))))


def net() -> Net:
    torch.manual_seed(3)
    return Net().double().train()


def deviation(host: str | None = None, **fields: Any) -> float:
    """The deviation of losses, weights and statistics from one device's; the second batch leaves a rank empty."""
    plan, given, model = Plan(dp=dist.get_world_size(), batch_norm="sync", **fields), batches(12, 3, 9), net()
    expected = oracle.train(model, loss, sgd, given)
    with fake_hosts(host):
        step = parallelize(net(), loss, sgd, plan)
    losses = [step(local_batch(batch, plan, step.dp_index)).loss for batch in given]
    step.flush()
    statistics = dict(step.model.named_buffers())
    errors = [
        (statistics[name].double() - buffer.double()).abs().max().item() for name, buffer in model.named_buffers()
    ]
    return max(oracle.deviation(oracle.snapshot(step, losses, []), expected), *errors)


def wrapped_deviation(transport: str) -> float:
    """The same for a loop of the user's and torch's SyncBatchNorm, whose own forward refuses CPUs."""
    size, rank = dist.get_world_size(), dist.get_rank()
    given, alone = batches(12, 3, 9), net()
    expected = oracle.train(alone, loss, sgd, given)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    plan = Plan(dp=size, batch_norm="sync", transport=transport, bucket_bytes=300)
    optimizer = DistributedOptimizer(sgd(model.parameters()), model, plan)
    for batch in given:
        inputs, targets = local_batch(batch, plan, rank)
        optimizer.zero_grad()
        (loss(model(inputs), targets).sum() * size / len(batch[1])).backward()
        optimizer.step()
    trained = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**expected.weights, **dict(alone.named_buffers())}
    return max((trained[name].double() - each.double()).abs().max().item() for name, each in wanted.items())


def diverge(transport: str) -> str:
    """What a rank raises when rank 1 normalizes other widths than rank 0."""
    plan, (batch,) = Plan(dp=2, batch_norm="sync", transport=transport), batches(9)
    model = net()
    step = parallelize(model, loss, sgd, plan)
    step(local_batch(batch, plan, step.dp_index))
    model.is_wayward = step.rank == 1
    try:
        step(local_batch(batch, plan, step.dp_index))
    except DivergenceError as error:
        return str(error)
    return ""


def verified() -> float | None:
    """The largest deviation that `fourfold verify` finds for a model with torch's SyncBatchNorm; on rank 0."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.SyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 3))

    data = Data(train=TensorSource(*batches(64)[0]))
    task = Task(model=model, loss=loss, data=lambda: data, optimizer=sgd, batch_size=8, steps=3)
    result = verify(task, Plan(dp=dist.get_world_size(), batch_norm="sync"))
    return None if result is None else result.max_deviation
