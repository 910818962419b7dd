"""A loop that was written for Horovod; docs/from-horovod.md shows the original.

python examples/from_horovod.py
fourfold run -n 2 examples/from_horovod.py
mpirun -n 2 python examples/from_horovod.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import fourfold as ff


def main() -> None:
    world = ff.world()
    torch.manual_seed(world.rank)
    inputs = torch.linspace(0, 1, 8000).view(1000, 8)
    data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    feed = ff.Feed(data, batch_size=64, seed=0)  # batch_size is global; each epoch has its own order

    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ff.DistributedOptimizer(optimizer, model)  # rank 0's weights, everywhere
    # If only rank 0 has read a checkpoint, this sends it to all ranks: weights, optimizer state, the epoch.
    begin = optimizer.broadcast_state(0)
    for _ in range(begin, 10):
        for x, y in feed:
            x, y = x.to(world.device), y.to(world.device)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()  # when it returns, every .grad is the mean over ranks
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    inputs, targets = (tensor.to(world.device) for tensor in data.tensors)
    loss = F.mse_loss(model(inputs), targets).item()
    if world.rank == 0:
        print(f"loss {loss:.4f} on {world.size} ranks, gradients through: {optimizer.transport_name}")
    assert loss < 0.01


if __name__ == "__main__":
    main()
