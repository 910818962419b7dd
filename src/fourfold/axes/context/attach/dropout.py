"""Attention dropout with cp > 1: the same on every mesh, whatever the order in which ranks and checkpoints draw it.

call  the place of an attention call in its microbatch's forward
Law: a checkpoint's second forward drops what the first did.
"""

from collections.abc import Sequence
from typing import Any

from fourfold.axes.context.work.dropout import AttentionDropout
from fourfold.model.draw_slices import DrawSlice
from fourfold.model.rank_dropout import TaggedDraws, checkpoint_error
from fourfold.model.sdpa_interception import AttentionCall
from fourfold.torch_kit.torch_private import is_in_backward
from fourfold.words.errors import Problem, TaskError

HEADS_DIM = 1


class AttentionDropoutCounter:
    """Gives each attention call with dropout its place in the step, from which its `AttentionDropout` is made."""

    def __init__(self, seed: int, draws: TaggedDraws) -> None:
        self._seed, self._draws = seed, draws

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

    def next_dropout(self, call: AttentionCall) -> AttentionDropout:
        """The dropout of the attention call that begins now, or that a checkpoint repeats in backward."""
        what = f"attention with dropout_p = {call.dropout_p:g}"
        tag, part = self._draws.next(what, call.q)
        if tag not in self._dropouts:
            if is_in_backward():
                raise checkpoint_error(f"cp > 1 and {what}")
            start = self._first_sample + sum(self._microbatch_sizes[: self._microbatch_index])
            samples = range(start, start + self._microbatch_sizes[self._microbatch_index])
            first_head = 0 if part is None else _first_head(part, what)
            self._dropouts[tag] = AttentionDropout(
                call.dropout_p, self._seed, self._step, self._call_index, samples, first_head
            )
            self._call_index += 1
        return self._dropouts[tag]


def _first_head(part: DrawSlice, what: str) -> int:
    """The first of the heads that are here."""
    if (part.dim, len(part.ranges), part.fold) != (HEADS_DIM, 1, 1):
        got = f"cp > 1, tp > 1 and {what}, whose queries are split in dim {part.dim}"
        raise TaskError(Problem(got, "queries [B, H, L, D] that are split by heads", "dropout = 0, or cp = 1"))
    return part.start
