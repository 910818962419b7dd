"""A loop that was written for DistributedDataParallel; docs/from-ddp.md shows the original.

python examples/from_ddp.py
fourfold run -n 2 examples/from_ddp.py
torchrun --nproc-per-node 2 examples/from_ddp.py
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import fourfold as ff


def main() -> None:
    world = ff.world()
    torch.manual_seed(0)
    inputs = torch.rand(992, 8)
    data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    # 31 chunks of 32 rows: with two ranks, one has a chunk more than the other.
    chunks = range(31)[world.rank :: world.size]
    shard = Subset(data, [row for chunk in chunks for row in range(32 * chunk, 32 * chunk + 32)])
    loader = DataLoader(shard, batch_size=16)

    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = ff.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for _ in range(10):
        with optimizer.join():  # a rank that has run out of batches answers the others with zeros
            for number, (x, y) in enumerate(loader, 1):
                last = number % 2 == 0
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    (F.mse_loss(model(x), y) / 2).backward()
                if last:
                    optimizer.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    loss = F.mse_loss(model(data.tensors[0]), data.tensors[1]).item()
    if world.rank == 0:
        print(f"loss {loss:.4f} on {world.size} ranks, gradients through: {optimizer.transport_name}")
    assert loss < 0.01


if __name__ == "__main__":
    main()
