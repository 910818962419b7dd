"""Eight features and three classes: batches in float64, a loss for each sample, and the training of a given model."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.orders.sample_order import shard_range
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle

Batch = tuple[Tensor, Tensor]
sgd = functools.partial(torch.optim.SGD, lr=0.1)


def batches(*sizes: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(size, 8), torch.randint(0, 3, (size,), generator=generator)) for size in sizes]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def local_batch(batch: Batch, plan: Plan, index: int) -> Batch:
    """A data rank's part of a batch."""
    start, stop = shard_range(0, len(batch[1]), plan.dp, index)
    return batch[0][start:stop], batch[1][start:stop]


def train(comm: Any, model: nn.Module, plan: Plan, global_batches: list[Batch]) -> oracle.TrainingResult:
    step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)
    losses = [step(local_batch(batch, plan, step.dp_index)).loss for batch in global_batches]
    step.flush()
    return oracle.snapshot(step, losses, [])
