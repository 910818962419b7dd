"""Dropout with sp > 1: each rank drops other entries of its tokens; dropout in attention is the same on every mesh.

The ranks that share a sequence have equal states of torch's random number generator. So what a model draws per sample
or per layer (stochastic depth) is the same on all of them. Dropout is drawn per token, and needs other numbers on each.

tag  a number drawn from the equal states; a checkpoint, which restores the state, draws the same tag again
Law: the states stay equal on these ranks, and a checkpoint's second forward drops what the first did.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.sequence.dropout import AttentionDropout
from fourfold.parts.splitmix64 import GOLDEN_GAMMA
from fourfold.parts.torch_private import is_in_backward
from fourfold.step.sequence.sdpa_interception import DROPOUT_FUNCTIONS
from fourfold.words.errors import Problem, TaskError

_MAX_TAG = 2**62


def per_rank_dropouts(index: int) -> dict[Any, Callable[..., Tensor]]:
    """Replacements for torch's dropout functions, for the rank at this index on the sequence axis."""

    def dropout_per_rank(
        func: Callable[..., Tensor], x: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **more: Any
    ):
        if not training or p == 0.0:
            return func(x, p, training, *rest, **more)
        # The tag is the same on all ranks, and again when a checkpoint recomputes its forward.
        seed = _draw_tag() + index * GOLDEN_GAMMA
        cuda = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            torch.manual_seed(seed % 2**63)
            return func(x, p, training, *rest, **more)

    return dict.fromkeys(DROPOUT_FUNCTIONS, dropout_per_rank)


class AttentionDropoutCounter:
    """Gives each attention call with dropout its place in the step, from which its `AttentionDropout` is made."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def begin_step(self, step: int, first_sample: int, microbatch_sizes: Sequence[int]) -> None:
        """Begin a step. `first_sample`: the index of this rank's first sample, in the global batch if that is known.

        `microbatch_sizes`: the sizes of the microbatches that are not empty.
        """
        self._step, self._first_sample, self._microbatch_sizes = step, first_sample, microbatch_sizes
        self._microbatch_index, self._call_index = -1, 0
        self._dropouts: dict[int, AttentionDropout] = {}

    def next_microbatch(self, *_: Any) -> None:
        """The forward of the next microbatch begins."""
        self._microbatch_index, self._call_index = self._microbatch_index + 1, 0

    def next_dropout(self, p: float) -> AttentionDropout:
        """The dropout of the attention call that begins now, or that a checkpoint repeats in backward."""
        tag = _draw_tag()
        if tag not in self._dropouts:
            if is_in_backward():
                got = "sp > 1, dropout in attention, and a checkpoint that does not restore the random number generator"
                raise TaskError(
                    Problem(
                        got,
                        "the same dropout in both forwards of a checkpoint",
                        "checkpoint(…, preserve_rng_state=True)",
                    )
                )
            start = self._first_sample + sum(self._microbatch_sizes[: self._microbatch_index])
            samples = range(start, start + self._microbatch_sizes[self._microbatch_index])
            self._dropouts[tag] = AttentionDropout(p, self._seed, self._step, self._call_index, samples)
            self._call_index += 1
        return self._dropouts[tag]


def _draw_tag() -> int:
    return int(torch.randint(_MAX_TAG, ()))
