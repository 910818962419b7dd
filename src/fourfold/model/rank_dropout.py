"""Rank dropout: ranks that share samples drop other entries of what only one of them has, the same of what all have.

These ranks have equal states of torch's random number generator. So what a model draws per sample or per layer
(stochastic depth), and dropout of tensors that all of them have, is the same on all. Dropout of the tokens or features
of one rank needs other numbers on each.

tag  a number drawn from the equal states; a checkpoint, which restores the state, draws the same tag again
Law: the states stay equal on these ranks, and a checkpoint's second forward drops what the first did.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.model.draw_slices import DrawSlice, DrawSlices
from fourfold.model.sdpa_interception import DROPOUT_FUNCTIONS, AttentionCall, intercept_attention
from fourfold.torch_kit import generators
from fourfold.torch_kit.fingerprint import GOLDEN_GAMMA
from fourfold.torch_kit.torch_private import is_in_backward
from fourfold.words.errors import Problem, TaskError

MAX_TAG = 2**62


class TaggedDraws:
    """The draws of a rank's steps: the tag and the slice of each."""

    def __init__(self, slices: DrawSlices) -> None:
        self.slices = slices
        self._by_tag: dict[int, DrawSlice | None] = {}

    def begin_step(self) -> None:
        """Forget the tags of the step before."""
        self._by_tag = {}

    def next(self, what: str, tensor: Tensor) -> tuple[int, DrawSlice | None]:
        """The tag and the slice of the draw that begins now, or that a checkpoint repeats in backward.

        Raises TaskError if it cannot be told which draw is repeated.
        """
        tag = int(torch.randint(MAX_TAG, (), device="cpu"))
        if self.slices.are_all_whole:
            return tag, None
        if tag not in self._by_tag:
            if is_in_backward():
                raise checkpoint_error(f"tp > 1 and {what}")
            self._by_tag[tag] = self.slices.next(what, tensor)
        return tag, self._by_tag[tag]


def checkpoint_error(what: str) -> TaskError:
    """The error for a draw in backward that has no first one."""
    got = f"{what}, and a checkpoint that does not restore the random number generator"
    need = "the same dropout in both forwards of a checkpoint"
    return TaskError(Problem(got, need, "checkpoint(…, preserve_rng_state=True)"))


class RankDropout:
    """Replaces torch's dropout functions, for the rank at `index` of `size` of the context axis."""

    def __init__(self, draws: TaggedDraws, index: int = 0, size: int = 1) -> None:
        self._draws, self._index, self._size = draws, index, size

    @property
    def overrides(self) -> dict[Any, Callable[..., Tensor]]:
        """See `intercept_attention`."""
        return dict.fromkeys(DROPOUT_FUNCTIONS, self._drop)

    def _drop(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
        if not training or p == 0.0:
            return func(*args, **kwargs)
        x = given["input"]
        tag, part = self._draws.next(f"dropout = {p:g}", x)
        if x.numel() and (part is None or len(part.ranges) == 1):
            with self._seeded(tag, part, x):
                return func(*args, **kwargs)
        # Without elements, torch's dropout is no part of the graph. Then a checkpoint would end its second forward
        # earlier here than on ranks that have some, and not be in their last collectives.
        mask = x.new_ones(x.shape) if part is None or not x.numel() else self._mask(func, p, tag, part, x)
        return x.mul_(mask) if given.get("inplace") or func is torch.dropout_ else x * mask

    def _mask(self, func: Callable[..., Tensor], p: float, tag: int, part: DrawSlice, x: Tensor) -> Tensor:
        """What dropout multiplies `x` by, of several ranges."""
        masks = []
        for number, length in enumerate(part.lengths):
            shape = list(x.shape)
            shape[part.dim] = length
            with self._seeded(tag, part, x, number):
                masks.append(func(x.new_ones(shape), p, True))
        return torch.cat(masks, part.dim)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention with dropout, where this rank has all tokens."""
        if not call.dropout_p:
            return call.run_sdpa()
        tag, part = self._draws.next(f"attention with dropout_p = {call.dropout_p:g}", call.q)
        with self._seeded(tag, part, call.q):
            return call.run_sdpa()

    @contextlib.contextmanager
    def _seeded(self, tag: int, part: DrawSlice | None, tensor: Tensor, number: int = 0) -> Iterator[None]:
        """Within, torch draws this rank's numbers for range `number` of a slice; then its states are as before.

        Where all ranks draw the same numbers, they draw them from their states.
        """
        if part is None and self._size == 1:
            yield
            return
        start = 0 if part is None else part.ranges[number][0]
        seed = tag + (self._index + self._size * start) * GOLDEN_GAMMA
        with generators.unchanged(tensor.device):
            generators.seed(tensor.device, seed % 2**63)
            yield


class SplitDropout:
    """The dropout of a model whose features are split, on a rank that has all tokens of its samples."""

    def __init__(self, model: nn.Module, slices: DrawSlices) -> None:
        self._model, self._draws = model, TaggedDraws(slices)
        self._dropout = RankDropout(self._draws)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, one step or evaluation draws each rank's own numbers for what is split."""
        if self._draws.slices.are_all_whole:
            yield
            return
        self._draws.begin_step()
        with (
            self._draws.slices.numbering(self._model),
            intercept_attention(self._dropout.attend, overrides=self._dropout.overrides, takes_any_shape=True),
        ):
            yield
