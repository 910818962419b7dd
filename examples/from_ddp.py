"""A script that was written for DistributedDataParallel; docs/from-ddp.md shows the original.

python examples/from_ddp.py
fourfold run -n 2 examples/from_ddp.py
torchrun --nproc-per-node 2 examples/from_ddp.py weights.pt
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fourfold as ff


def main() -> None:
    world = ff.world()
    torch.manual_seed(0)
    inputs = torch.rand(1000, 8)
    data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    loader = ff.shard(DataLoader(data, batch_size=16, shuffle=True))  # a new order in every epoch

    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ff.DistributedOptimizer(optimizer, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    loss = torch.tensor(float("nan"))
    for _ in range(10):
        for x, y in loader:
            x, y = x.to(world.device), y.to(world.device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()  # when it returns, every .grad is the mean over ranks
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
    if world.is_main:
        print(f"loss {loss.item():.4f} on {world.size} ranks, gradients through: {optimizer.transport_name}")
        if len(sys.argv) > 1:
            torch.save(model.state_dict(), sys.argv[1])
    assert loss.item() < 0.01


if __name__ == "__main__":
    main()
