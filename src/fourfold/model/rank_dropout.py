"""Rank dropout: ranks that share samples drop other entries of what only one of them has, the same of what all have.

tag    a number drawn from the equal states; a checkpoint, which restores the state, draws the same tag again
draw   a call of dropout, or of attention with dropout; a module's draws are numbered within a forward of the model
slice  what this rank has of the tensor that the whole model draws for; None: all of it
Law: the states stay equal on these ranks, and a checkpoint's second forward drops what the first did.
Law: two ranks have the same slice only where they have the same part of the tensor. A draw whose slice the dry run has
not found raises an error.

These ranks have equal states of torch's random number generator. So what a model draws per sample or per layer
(stochastic depth), and dropout of tensors that all of them have, is the same on all. Dropout of the tokens or features
of one rank needs other numbers on each.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.model.sdpa_interception import DROPOUT_FUNCTIONS, AttentionCall, intercept_attention
from fourfold.torch_kit import generators
from fourfold.torch_kit.fingerprint import GOLDEN_GAMMA
from fourfold.torch_kit.torch_private import is_in_backward
from fourfold.words.errors import Problem, TaskError

# ---- draw slices ----------------------------------------------------------------------------------------------------


class DrawSlice(NamedTuple):
    """Ranges of one dim of a whole tensor, one behind the other in `dim` of the tensor that is here.

    ranges  [start, stop) of each
    fold    how often these features are in the dim: more than once where it is samples by features, [B · n]
    is_of_tokens  the dim is that of the tokens, which may be of another length in each batch. The range then tells
            this place from the others, and nothing else
    """

    ndim: int
    dim: int
    ranges: tuple[tuple[int, int], ...]
    fold: int = 1
    is_of_tokens: bool = False

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in self.ranges]

    @property
    def start(self) -> int:
        return self.ranges[0][0]

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor may be what is here, whatever its other dims."""
        if tensor.dim() != self.ndim:
            return False
        if self.is_of_tokens:
            return True
        length, own = tensor.shape[self.dim], sum(self.lengths)
        return length == own if self.fold == 1 else length % own == 0


class FoundDraw(NamedTuple):
    """A draw of the dry run: the module that made it, and its slice."""

    module: str
    part: DrawSlice | None

    @classmethod
    def from_json(cls, module: str, part: Sequence[Any] | None) -> "FoundDraw":
        if part is None:
            return cls(module, None)
        ndim, dim, ranges, *more = part
        return cls(module, DrawSlice(ndim, dim, tuple((start, stop) for start, stop in ranges), *more))


class DrawSlices:
    """The slices of one rank's draws, on an axis of `size` tensor ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_module: dict[str, list[DrawSlice | None]] | None = {} if size == 1 else None
        self.are_all_whole = size == 1
        """Whether it is known that this rank has all of each tensor that it draws for."""
        self._active: list[str] = []
        self._num_draws: dict[str, int] = {}

    def learn(self, draws: Iterable[FoundDraw], *, training: bool = True) -> None:
        """Take over what the dry run has found in a forward. One in evaluation mode tells nothing of training."""
        found: dict[str, list[DrawSlice | None]] = {}
        for module, part in draws:
            found.setdefault(module, []).append(part)
        self._by_module = {**(self._by_module or {}), **found}
        self.are_all_whole = training and all(part is None for parts in self._by_module.values() for part in parts)

    @contextlib.contextmanager
    def numbering(self, model: nn.Module) -> Iterator[None]:
        """Within, the draws of this model's forwards are numbered."""
        if self.are_all_whole:
            yield
            return
        self._active = []
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, name)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, *_: Any) -> None:
        if not self._active and not is_in_backward():
            self._num_draws = {}
        self._active.append(name)

    def _leave(self, _: nn.Module, args: Any, output: Any) -> None:
        self._active.pop()
        if output is not None and not self._active and not is_in_backward():
            for name, number in self._num_draws.items():
                self._check_number(name, number)

    def next(self, what: str, tensor: Tensor) -> DrawSlice | None:
        """The slice of the next draw, which the running module makes for a tensor. Raises TaskError."""
        if self.are_all_whole or not self._active:  # outputs, which the loss gets, are whole
            return None
        name = self._active[-1]
        number = self._num_draws[name] = self._num_draws.get(name, 0) + 1
        got = f"tp = {self._size} and {what} in {name or 'the model'}"
        if self._by_module is None:
            need = "a dry run that has compared the whole model: it finds which features a rank draws for"
            raise _error(f"{got}, where the tensor rules are unchecked", need, "dropout = 0")
        parts = self._by_module.get(name)
        if parts is None:
            got += ", which drew nothing in the dry run of the first batch"
            raise _error(got, "a first forward that draws where later ones do", "dropout = 0")
        if _are_equal(parts):
            part = parts[0]
        else:
            self._check_number(name, number, is_last=False)
            part = parts[number - 1]
        if part is not None and not part.fits(tensor):
            got = f"{got}, for {list(tensor.shape)}, with {sum(part.lengths)} split features in dim {part.dim} before"
            raise _error(got, "tensors that are split as in the dry run of the first batch", "dropout = 0")
        return part

    def _check_number(self, name: str, number: int, *, is_last: bool = True) -> None:
        """Raise TaskError for a module that draws for whole and for split tensors, as often as not in the dry run."""
        parts = (self._by_module or {}).get(name, [])
        if _are_equal(parts) or number == len(parts) or (number < len(parts) and not is_last):
            return
        got = f"{name} draws for whole and for split tensors, {len(parts)} times in the dry run and {number} times now"
        raise _error(got, "the same draws in each forward", "a separate dropout module for each place")


def _are_equal(parts: Sequence[DrawSlice | None]) -> bool:
    return all(part == parts[0] for part in parts)


def _error(got: str, need: str, attempt: str) -> TaskError:
    return TaskError(Problem(got, need, attempt), where="the tensor axis")


# ---- rank dropout ---------------------------------------------------------------------------------------------------


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
