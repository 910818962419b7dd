"""Your own loop, forward and backward; one line wraps the optimizer.

python examples/own_optimizer.py
fourfold run -n 2 examples/own_optimizer.py
torchrun --nproc-per-node 2 examples/own_optimizer.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import fourfold as ff


def main() -> None:
    world = ff.world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ff.DistributedOptimizer(optimizer, model)  # the one line
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

    generator = torch.Generator().manual_seed(world.rank)  # every rank draws samples of its own
    loss = torch.tensor(float("nan"))
    for _ in range(200):
        x = torch.rand(64 // world.size, 8, generator=generator).to(world.device)
        loss = F.mse_loss(model(x), x.square().mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # when it returns, every .grad is the mean over ranks
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
    if world.rank == 0:
        print(f"loss {loss.item():.4f} on {world.size} ranks, gradients through: {optimizer.transport_name}")
    assert loss.item() < 0.01


if __name__ == "__main__":
    main()
