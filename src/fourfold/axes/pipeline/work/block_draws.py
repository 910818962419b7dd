"""Block draws: the random numbers that a module of a divided model draws, whichever stage computes it.

segment  a module of the chain or of its ends, or what the model's forward does behind one; 0: in front of the first
Law: a segment draws the same numbers with any number of stages and any schedule: they follow from the microbatch and
the segment. Outside of a stage's forward, torch's generators are as if it had drawn nothing.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fourfold.axes.pipeline.work.chain import Chain
from fourfold.plan.rng import segment_seed
from fourfold.torch_kit import generators


@contextlib.contextmanager
def seeded_segments(model: nn.Module, chain: Chain, seed: int, device: torch.device) -> Iterator[None]:
    """Within, one forward of the model draws the numbers of the microbatch with this seed."""

    def begin(segment: int, *_: Any) -> None:
        generators.seed(device, segment_seed(seed, segment))

    hooks = []
    for index, name in enumerate((*chain.before, *chain.blocks, *chain.behind)):
        module, inside = model.get_submodule(name), 2 * index + 1
        hooks.append(module.register_forward_pre_hook(functools.partial(begin, inside), prepend=True))
        hooks.append(module.register_forward_hook(functools.partial(begin, inside + 1)))
    try:
        with generators.unchanged(device):
            begin(0)
            yield
    finally:
        for hook in hooks:
            hook.remove()
