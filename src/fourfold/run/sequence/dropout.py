"""Dropout of a rank's own tokens: drawn apart from the other ranks of its line.

Ranks that hold tokens of the same samples have one state of torch's generator, so that what is drawn for a sample or a
layer (stochastic depth) is the same on all of them. Dropout is drawn for each token: each rank has draws of its own.
Law: the shared state moves on alike on all ranks, and a checkpoint's second forward draws what the first drew.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)
_LIMIT = 2**62


def apart(index: int) -> dict[Any, Callable[..., Tensor]]:
    """What is to be called instead of torch's dropouts on the rank at `index` of the sequence axis."""

    def drawn(func: Callable[..., Tensor], x: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **more: Any):
        if not training or p == 0.0:
            return func(x, p, training, *rest, **more)
        # From the shared state: the seed is the same on all ranks, and again when a checkpoint is computed again.
        seed = int(torch.randint(_LIMIT, ())) + index * 0x9E3779B97F4A7C15
        cuda = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            torch.manual_seed(seed % 2**63)
            return func(x, p, training, *rest, **more)

    return dict.fromkeys(DROPOUTS, drawn)
