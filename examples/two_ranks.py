"""Your own loop: a model, a loss, an optimizer, a plan. The same file runs alone and on any number of processes.

python examples/two_ranks.py
fourfold run -n 2 examples/two_ranks.py
torchrun --nproc-per-node 2 examples/two_ranks.py
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import fourfold as ff


class Parity(torch.utils.data.Dataset):
    """Sixteen bits, and whether an odd number of the first four is set."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        bits = torch.tensor([index * 2654435761 >> place & 1 for place in range(8, 24)], dtype=torch.float32)
        return bits, (bits[:4].sum() % 2).long()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")  # unreduced: the mean is taken over all ranks

    plan = ff.Plan(dp=ff.world().size, microbatches=2)
    step = ff.parallelize(model, loss, functools.partial(torch.optim.AdamW, lr=3e-3), plan)
    feed = ff.Feed(Parity(), plan, batch_size=64, seed=0)  # batch_size is global
    metrics = None
    for _ in range(12):  # epochs
        for batch in feed:
            metrics = step(batch)
    assert metrics is not None
    if step.rank == 0:
        print(f"loss {metrics.loss:.4f} on {plan.dp} ranks, gradients through: {step.transport_name}")
    assert metrics.loss < 0.1


if __name__ == "__main__":
    main()
