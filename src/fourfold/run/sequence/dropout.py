"""Dropout: of a rank's own tokens drawn apart from the other ranks of its line, of attention the same on every mesh.

Ranks that hold tokens of the same samples have one state of torch's generator, so that what is drawn for a sample or a
layer (stochastic depth) is the same on all of them. Dropout is drawn for each token: each rank has draws of its own.
tag  a number drawn from the shared state: a checkpoint, which restores the state, draws it again
Law: the shared state moves on alike on all ranks, and a checkpoint's second forward drops what the first dropped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.sequence import AttentionDropout
from fourfold.run.sequence.route import DROPOUTS
from fourfold.words.errors import Problem, TaskError

_LIMIT = 2**62


def apart(index: int) -> dict[Any, Callable[..., Tensor]]:
    """What is to be called instead of torch's dropouts on the rank at `index` of the sequence axis."""

    def drawn(func: Callable[..., Tensor], x: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **more: Any):
        if not training or p == 0.0:
            return func(x, p, training, *rest, **more)
        # From the shared state: the seed is the same on all ranks, and again when a checkpoint is computed again.
        seed = _tag() + index * 0x9E3779B97F4A7C15
        cuda = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            torch.manual_seed(seed % 2**63)
            return func(x, p, training, *rest, **more)

    return dict.fromkeys(DROPOUTS, drawn)


class Drawn:
    """Numbers the calls of attention of a step that drop something."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def begin(self, step: int, first: int, sizes: Sequence[int]) -> None:
        """Begin a step of microbatches of these sizes, whose first sample is `first` of the global batch."""
        self._step, self._first, self._sizes = step, first, sizes
        self._microbatch, self._call = -1, 0
        self._dropouts: dict[int, AttentionDropout] = {}

    def forward(self, *_: Any) -> None:
        """The model's forward begins on the next microbatch."""
        self._microbatch, self._call = self._microbatch + 1, 0

    def dropout(self, p: float) -> AttentionDropout:
        """What is dropped in the call of attention that now begins, or is made again for a checkpoint's backward."""
        tag = _tag()
        if tag not in self._dropouts:
            if torch._C._current_graph_task_id() != -1:
                got = "sp > 1, dropout in attention, and a checkpoint that does not restore the generator's state"
                raise TaskError(Problem(got, "the same dropout in both forwards", "preserve_rng_state=True"))
            start = self._first + sum(self._sizes[: self._microbatch])
            samples = range(start, start + self._sizes[self._microbatch])
            self._dropouts[tag] = AttentionDropout(p, self._seed, self._step, self._call, samples)
            self._call += 1
        return self._dropouts[tag]


def _tag() -> int:
    return int(torch.randint(_LIMIT, ()))
