"""Training with stochastic depth around attention, saved on one mesh and resumed on another. Results are JSON.

The ranks are processes: each needs a generator of its own.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff
from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.feed.feed import Feed
from fourfold.step.parallelize import parallelize
from tests.cases import Case, batches, local_batch
from tests.checkpoint_runs import MemoryLog

STEPS, SAVE_AT, SEED, KEEP_PROBABILITY = 6, 2, 5, 0.5


class StochasticDepth(nn.Module):
    """Two layers of attention; a draw per layer and forward says whether the layer is used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, 16), nn.Embedding(16, 16)
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 48) for _ in range(2)), nn.Linear(16, 256)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            if not self.training or torch.rand(()) < KEEP_PROBABILITY:
                q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
                x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            else:  # 0, but a gradient: every parameter is used in every step
                x = x + 0.0 * (layer.weight.sum() + layer.bias.sum())
        return self.head(x)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def train(folder: str, dp: int, cp: int, *, save: bool = False, resume: bool = False) -> dict[str, Any]:
    """The losses of this rank's steps, and what its generator draws after them."""
    torch.manual_seed(1)
    model = StochasticDepth().double()
    step = parallelize(model, loss, lambda p: torch.optim.AdamW(p, lr=1e-2), ff.Plan(dp=dp, cp=cp), seed=SEED)
    feed = Feed([(torch.zeros(1), torch.zeros(1)) for _ in range(8)], batch_size=8)
    keeper = CheckpointManager(TrainingState(step, feed), AttemptDir(Path(folder), "a"), MemoryLog(), seed=SEED)
    first = 0
    if resume:
        progress = keeper.resume()
        assert progress is not None
        first = progress.step
    losses = []
    for number, batch in enumerate(batches(Case(model="lm", batch_sizes=(8,) * STEPS))[first:], first + 1):
        losses.append(step(local_batch(batch, dp, step.dp_index)).loss)
        if save and number == SAVE_AT:
            keeper.save(TrainingProgress(number))
            keeper.wait()
    return {"losses": losses, "draws": torch.rand(3).tolist()}
