"""What the ranks of a spawned world do about dropout on the tensor axis. Results are JSON."""

import torch
from torch import Tensor, nn

import fourfold as ff


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.up(x)))


def masks(dp: int, tp: int) -> list[list[bool]]:
    """Which features of this rank were dropped, by step."""
    step = ff.parallelize(
        nn.Sequential(Block()),
        lambda outputs, targets: (outputs - targets).square().mean(1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ff.Plan(dp=dp, tp=tp),
        tensor={"*.up": "column", "*.down": "row"},
    )
    generator = torch.Generator().manual_seed(step.dp_index)
    batches = [(torch.randn(4, 8, generator=generator), torch.zeros(4, 8)) for _ in range(2)]
    found: list[list[bool]] = []
    step.dry_run(batches[0], training=True)
    step.model.get_submodule("0.dropout").register_forward_hook(
        lambda module, inputs, output: found.append((output == 0).flatten().tolist())
    )
    for batch in batches:
        step(batch)
    return found
