"""Recompute: what backward computes again in place of keeping it (activation checkpointing), and what is kept.

region   a part of a forward of which autograd keeps nothing but the inputs; backward runs it a second time
full     nothing else is kept
kept     with `selective`: the results of products with weights, of fused attention, and of the collectives that
         `kept` wraps; the second forward takes them in place of computing them
Law: the second forward computes what the first one did, bit for bit, so gradients are those without regions.

Products of two activations (`bmm`, `baddbmm`) are computed again: those of an attention written by hand are as large as
the square of the sequence. `create_selective_checkpoint_contexts` of torch counts every operation of both forwards;
here they may differ in all that is not kept, such as a collective that is not repeated.

Sources: Chen et al. (arXiv 1604.06174); selective: Korthikanti et al. (arXiv 2205.05198); `torch.utils.checkpoint`,
without reentrant autograd.

Law: found from the calls that this thread is in. A checkpoint leaves no other trace in what runs inside it.
"""

import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from fourfold.torch_kit.torch_dispatch import PRODUCTS_AND_ATTENTION, UNCOUNTED_VIEWS, EagerDispatchMode, kept_alias
from fourfold.torch_kit.torch_private import storage_key, version_of
from fourfold.words.errors import Problem, TrainingError

Compute = Callable[[], tuple[Tensor, ...]]
COLLECTIVE = "a collective"


class _Kept(NamedTuple):
    """The results of one operation, and the versions of these and of views that are not counted with them."""

    results: tuple[Any, ...]
    versions: list[tuple[Tensor, int]]


class _Results:
    """What one region keeps: by operation, or by `kept`, the results in order."""

    def __init__(self) -> None:
        self._kept: dict[Any, deque[_Kept]] = {}
        self._by_storage: dict[int, _Kept] = {}

    def add(self, key: Any, results: Any) -> None:
        aliases = tuple(kept_alias(each) if isinstance(each, Tensor) else each for each in _as_tuple(results))
        kept = _Kept(aliases, [(each, version_of(each)) for each in aliases if isinstance(each, Tensor)])
        self._kept.setdefault(key, deque()).append(kept)
        self._by_storage |= {storage_key(each): kept for each, _ in kept.versions}

    def add_views(self, views: Any) -> None:
        """Views that may be of what is kept: who writes them changes it."""
        for each in _as_tuple(views):
            if (kept := self._by_storage.get(storage_key(each))) is not None:
                kept.versions.append((kept_alias(each), version_of(each)))

    def take(self, key: Any) -> tuple[Any, ...]:
        if not self._kept.get(key):
            got = f"{key} in the second forward of a block, and not in the first"
            raise TrainingError(Problem(got, "the same forward twice", 'recompute = "full" or "none"'))
        self._by_storage.clear()  # the first forward is over, and what is taken should be freed when it is used
        kept = self._kept[key].popleft()
        if any(version_of(each) != version for each, version in kept.versions):
            got = f"the result of {key}, changed in place after it was kept"
            raise TrainingError(Problem(got, "what forward computed with", 'recompute = "full" or "none"'))
        return kept.results


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


class _Keeping(EagerDispatchMode):
    """The first forward of a selective region. `is_off`: within `kept`, which keeps its results as one."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results, self._is_off = results, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS_AND_ATTENTION and not self._is_off:
            self._results.add(func, result)
        if func in UNCOUNTED_VIEWS:
            self._results.add_views(result)
        return result

    def kept(self, compute: Compute) -> tuple[Tensor, ...]:
        self._is_off = True
        try:
            results = compute()
        finally:
            self._is_off = False
        self._results.add(COLLECTIVE, results)
        return results


class _Replaying(EagerDispatchMode):
    """The second forward."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS_AND_ATTENTION:
            return func(*args, **(kwargs or {}))
        first, *others = self._results.take(func)
        return (first, *others) if others else first

    def kept(self, compute: Compute) -> tuple[Tensor, ...]:
        return self._results.take(COLLECTIVE)


class _Region(threading.local):
    """What `kept` does in this thread."""

    mode: _Keeping | _Replaying | None = None


_region = _Region()


def kept(compute: Compute) -> tuple[Tensor, ...]:
    """The results of `compute`; in the second forward of a `selective` region those of the first.

    For the forward of an autograd function whose collectives the second forward should not repeat. The results must
    not be memory that is used again.
    """
    return compute() if _region.mode is None else _region.mode.kept(compute)


def is_keeping() -> bool:
    """Whether `kept` keeps results now: its `compute` must not write what an operation has returned."""
    return _region.mode is not None


@contextlib.contextmanager
def _entered(mode: _Keeping | _Replaying) -> Iterator[None]:
    before, _region.mode = _region.mode, mode
    try:
        with mode:
            yield
    finally:
        _region.mode = before


def _selective_contexts() -> tuple[Any, Any]:
    results = _Results()
    return _entered(_Keeping(results)), _entered(_Replaying(results))


def compute_twice(function: Callable[..., Any], args: Any, kwargs: Any, *, selective: bool) -> Any:
    """`function(*args, **kwargs)` as a region: backward calls it a second time. With autograd off, a plain call."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    options = {"context_fn": _selective_contexts} if selective else {}
    return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)


def trained_inputs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The inputs of a region that have gradients. Others, such as masks, are of all blocks, and are kept once."""
    return [each for each in tensors if each.requires_grad]


# ---- Checkpoints of `torch.utils.checkpoint`: whether this thread runs inside one -----------------------------------


def is_in_checkpoint() -> bool:
    """Whether this thread runs the first forward of a checkpoint, of either kind."""
    return current_checkpoint() is not None


def current_checkpoint() -> FrameType | None:
    """The call of the innermost checkpoint whose first forward this thread runs."""
    return _call_of(checkpoint)


def is_in_reentrant_checkpoint() -> bool:
    """Whether this thread runs the first forward of a checkpoint with `use_reentrant=True`."""
    return _call_of(CheckpointFunction.forward) is not None


def is_in_reentrant_backward() -> bool:
    """Whether this thread runs the backward of such a checkpoint, which runs within another one."""
    return _call_of(CheckpointFunction.backward) is not None


def _call_of(function: Callable[..., Any]) -> FrameType | None:
    frame, code = inspect.currentframe(), inspect.unwrap(function).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
