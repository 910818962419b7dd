"""A loop that was written for DeepSpeed; docs/from-deepspeed.md shows the original.

python examples/from_deepspeed.py
fourfold run -n 2 examples/from_deepspeed.py
torchrun --nproc-per-node 2 examples/from_deepspeed.py
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import fourfold as ff


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets, reduction="none")  # unreduced: the mean is taken over all ranks


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.rand(1000, 8)
    data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))

    plan = ff.Plan(dp=ff.world().size, zero=1, microbatches=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    step = ff.parallelize(model, loss, functools.partial(torch.optim.AdamW, lr=1e-2), plan, clip=1.0)
    feed = ff.Feed(data, plan, batch_size=64, seed=0)  # batch_size is global
    schedule = torch.optim.lr_scheduler.LinearLR(step.optimizer, start_factor=0.1, total_iters=10)
    metrics = None
    for _ in range(10):
        for batch in feed:
            metrics = step(batch)  # forward, backward, clipping, update
            schedule.step()
    assert metrics is not None
    if step.rank == 0:
        print(f"loss {metrics.loss:.4f} on {plan.dp} ranks, gradients through: {step.transport_name}")
    assert metrics.loss < 0.01


if __name__ == "__main__":
    main()
