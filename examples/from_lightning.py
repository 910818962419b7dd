"""A LightningModule and its Trainer as a task and a run; docs/from-lightning.md shows the original.

python examples/from_lightning.py
fourfold run -n 2 examples/from_lightning.py
fourfold train examples/from_lightning.py:task -n 2 microbatches=2 width=64 evaluate_every=16
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

import fourfold as ff


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def evaluate(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
    return {"error": ((outputs - targets).abs().sum().item(), targets.numel())}  # (sum, count): ranks add them up


def data() -> ff.Data:
    inputs = torch.rand(1152, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.square().mean(1, keepdim=True)
    return ff.Data(
        train=TensorDataset(inputs[:1024], targets[:1024]), valid=TensorDataset(inputs[1024:], targets[1024:])
    )


def task(width: int = 32, lr: float = 1e-2) -> ff.Task:
    return ff.Task(
        model=functools.partial(model, width),
        loss=F.mse_loss,
        evaluate=evaluate,
        optimizer=functools.partial(torch.optim.AdamW, lr=lr),
        scheduler=lambda optimizer, steps: OneCycleLR(optimizer, max_lr=lr, total_steps=steps),
        data=data,
        batch_size=64,  # of all ranks and microbatches together
        epochs=10,
        clip=1.0,
    )


def main() -> None:
    result = ff.train(
        task(),
        ff.Plan(dp=ff.world().size, microbatches=2),
        evaluate_every=16,  # steps: an epoch has 16
        callbacks=[ff.callbacks.CSV(), ff.callbacks.EarlyStopping("error", patience=3)],
    )
    assert result.valid["error"] < 0.1
    if ff.world().is_main:
        print(f"error {result.valid['error']:.4f} after {result.steps} steps, in {result.folder}")


if __name__ == "__main__":
    main()
