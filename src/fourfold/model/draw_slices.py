"""Draw slices: for which part of a whole tensor a tensor rank draws random numbers, in each dropout of a model.

draw     a call of dropout, or of attention with dropout; a module's draws are numbered within a forward of the model
slice    what this rank has of the tensor that the whole model draws for; None: all of it
Law: two ranks have the same slice only where they have the same part of the tensor. A draw whose slice the dry run has
not found raises an error.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fourfold.torch_kit.torch_private import is_in_backward
from fourfold.words.errors import Problem, TaskError


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
