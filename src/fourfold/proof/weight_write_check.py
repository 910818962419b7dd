"""Weight write check: whether forwards of a dry run write trained weights in a way that changes the training.

read-only  weights that forward may not write at all: a write would be lost, or several ranks would make it
untracked  a write without a torch function: it cannot be undone
write      a torch function that changes a tensor in place, where the tensor shares elements with a parameter; even if
           the values stay the same, as with a clamp
saved      the elements of a parameter before its first write
renorm     a lookup in an embedding that shortens rows (`max_norm`)
Law: writes that pass this check are still compared between samples and numbers of forwards (`forward_comparison.py`).
Law: inside the mode, a parameter is saved before a torch function writes into it.

A write without a torch function, such as through numpy, is not seen here; fingerprints of the weights reveal it.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.model.weights import Weights
from fourfold.plan.check import ReadOnlyReason
from fourfold.torch_kit.fingerprint import fingerprints
from fourfold.torch_kit.param_access import restore_arguments, untracked_access
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import (
    DisableTorchFunction,
    has_memory,
    is_operator,
    is_view,
    version_of,
    written_arguments,
)
from fourfold.words.error_notes import format_names
from fourfold.words.errors import Problem

EDIT_ADVICE = "writing after the step, inside step.edit()"


def describe_trained(names: Sequence[str]) -> str:
    return f"{'the trained weight' if len(names) == 1 else 'the trained weights'} {format_names(names)}"


# ---- tracker -------------------------------------------------------------------------------------------------------

_AUGMENTED = "add sub mul matmul truediv floordiv mod and or xor lshift rshift pow"
_INPLACE_OPERATORS = frozenset({"__setitem__", *(f"__i{name}__" for name in _AUGMENTED.split())})
# Their names end in _, but they write no elements.
_NON_WRITING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
_EMBEDDING_FUNCTIONS = (F.embedding, F.embedding_bag)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class _SavedParam(NamedTuple):
    data: Tensor
    """The parameter's memory: restoring gives it the same memory again."""
    value: Tensor


class WeightWriteTracker(TorchFunctionMode):
    """Records the writes of this thread into a model's parameters."""

    def __init__(self, model: nn.Module, *, not_restored: Collection[str] = (), counts_renorms: bool = True) -> None:
        """`not_restored`: parameters that are not saved. `counts_renorms`: whether a renorm counts as a write."""
        super().__init__()
        self._not_restored, self._counts_renorms = not_restored, counts_renorms
        self._saved: dict[str, _SavedParam] = {}
        self.written: set[str] = set()
        """The names of the parameters that were written."""
        with untracked_access():
            self._parameters = dict(model.named_parameters())
            self._versions = {name: version_of(p) for name, p in self._parameters.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = restore_arguments(func, args, kwargs or {})
        # The compiler traces a mode, and could not compile what follows.
        if not torch.compiler.is_compiling() and (kwargs or _may_write(func)):
            for target in filter(_may_alias_param, _write_targets(func, args, kwargs)):
                self._record_write(target, is_renorm=func in _EMBEDDING_FUNCTIONS)
        return func(*args, **kwargs)

    @torch.no_grad()
    def _record_write(self, target: Tensor, *, is_renorm: bool) -> None:
        with untracked_access():
            for name in self._overlapping_params(target):
                if not is_renorm or self._counts_renorms:
                    self.written.add(name)
                if name not in self._saved and name not in self._not_restored:
                    data = self._parameters[name].data
                    self._saved[name] = _SavedParam(data, data.clone())

    def _overlapping_params(self, target: Tensor) -> list[str]:
        """The names of the parameters that share elements with a tensor."""
        same = [name for name, p in self._parameters.items() if p is target]
        # Tensors inside a transform of torch.func have no memory of their own.
        if same or not has_memory(target):
            return same
        storage, (start, end) = target.untyped_storage().data_ptr(), _address_range(target)
        return [
            name
            for name, p in self._parameters.items()
            if has_memory(p) and p.untyped_storage().data_ptr() == storage and _overlaps(p, start, end)
        ]

    @torch.no_grad()
    def changes(self) -> Mapping[str, Tensor]:
        """Fingerprints of the parameters that were written and have other elements than before, by name."""
        with untracked_access():
            now = {name: self._parameters[name].data for name in self.written & self._saved.keys()}
            changed = {name: p for name, p in now.items() if not is_identical(p, self._saved[name].value)}
            numbers = fingerprints(list(changed.values()))
        # In two halves: a fingerprint may exceed an int64.
        halves = [[number >> 32, number & 0xFFFFFFFF] for number in numbers]
        return {name: torch.tensor(half) for name, half in zip(changed, halves, strict=True)}

    def frozen_writes(self) -> list[tuple[str, Tensor, Tensor]]:
        """The frozen parameters that were written: names, elements now and before."""
        with untracked_access():
            frozen = [name for name in self.written & self._saved.keys() if not self._parameters[name].requires_grad]
            return [(name, self._parameters[name].data, self._saved[name].value) for name in sorted(frozen)]

    def replaced_storage(self) -> list[str]:
        """The names of the parameters that have another storage than before."""
        with untracked_access():
            pairs = [(name, self._parameters[name].data, saved.data) for name, saved in self._saved.items()]
        return [name for name, now, before in pairs if now.data_ptr() != before.data_ptr()]

    def untracked_writes(self) -> list[str]:
        """The names of the parameters whose version changed without a write that was recorded."""
        with untracked_access():
            recorded = self.written | self._saved.keys()
            now = {name: version_of(p) for name, p in self._parameters.items() if name not in recorded}
        return [name for name, version in now.items() if version != self._versions[name]]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the parameters that were saved."""
        with untracked_access():
            for name, (data, value) in self._saved.items():
                self._parameters[name].data = data
                if not is_identical(data, value):
                    data.copy_(value)


def _write_targets(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call writes."""
    if kwargs.get("out") is not None:
        yield from tree_leaves(kwargs["out"])
    if is_operator(func):
        for index, name in written_arguments(func):
            yield from tree_leaves(args[index] if index < len(args) else kwargs.get(name))
        return
    if func in _EMBEDDING_FUNCTIONS:
        if kwargs.get("max_norm") is not None:
            yield from tree_leaves(args[1] if len(args) > 1 else kwargs.get("weight"))
        return
    if kwargs.get("inplace") is True or _writes_first(func):
        yield from tree_leaves(args[0] if args else next(iter(kwargs.values()), None))


def _writes_first(func: Any) -> bool:
    """Whether a function writes its first argument, whatever the others are."""
    name = getattr(func, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__") and name not in _NON_WRITING
    return ends or name in _INPLACE_OPERATORS or (name == "__set__" and func == _SET_DATA)


@functools.lru_cache(maxsize=4096)
def _may_write(func: Any) -> bool:
    """Whether a call without keyword arguments may write an argument: asked for each call of a forward."""
    return is_operator(func) or func in _EMBEDDING_FUNCTIONS or _writes_first(func)


def _may_alias_param(tensor: Tensor) -> bool:
    """Whether a tensor may share elements with a parameter. A result of autograd does so only if it is a view."""
    with DisableTorchFunction():
        return tensor.grad_fn is None or is_view(tensor)


def _overlaps(tensor: Tensor, start: int, end: int) -> bool:
    first, last = _address_range(tensor)
    return first < end and start < last


def _address_range(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the address after its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def is_identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same elements; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


# ---- check ---------------------------------------------------------------------------------------------------------


class WeightWriteCheck:
    """Checks the weights of one rank."""

    def __init__(self, weights: Weights, read_only_reason: ReadOnlyReason | None, *, num_ranks: int) -> None:
        """`num_ranks` ranks have different parts of a batch."""
        self._weights, self.read_only_reason = weights, read_only_reason
        # On one device, rows are shortened before they are used, for any number of microbatches.
        self.counts_renorms = num_ranks > 1 or read_only_reason is not None
        """Whether a lookup in an embedding that shortens rows (`max_norm`) counts as a write."""
        self.reset()

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters that this rank has, by name."""
        return self._weights.trainable

    @property
    def trained_names(self) -> Collection[str]:
        return self._weights.trainable

    @property
    def not_restored(self) -> Collection[str]:
        """The weights that need no restoring after a forward, because a forward that writes them is refused."""
        return self.trained_names if self.read_only_reason is not None else ()

    def reset(self) -> None:
        """Begin a dry run."""
        self._written, self._replaced, self._untracked = set[str](), set[str](), set[str]()
        self._fingerprints_before = self._fingerprints()

    def _fingerprints(self) -> dict[str, int]:
        parameters = self._weights.storage.whole_params
        with untracked_access():
            return dict(zip(parameters, fingerprints(list(parameters.values())), strict=True))

    def observe(self, writes: WeightWriteTracker) -> None:
        """Record what a forward wrote, before it is undone."""
        if self.read_only_reason is not None:
            self._written |= writes.written
        self._replaced |= set(writes.replaced_storage())
        self._untracked |= set(writes.untracked_writes())

    def problems(self) -> list[Problem]:
        """What is wrong, after the dry run has restored all it can."""
        after, problems = self._fingerprints(), []
        changed = {name for name, value in after.items() if value != self._fingerprints_before[name]}
        if (names := self._sorted_names(self._written)) and self.read_only_reason is not None:
            setting, reason, attempt = self.read_only_reason
            got = f"forward writes {describe_trained(names)}, with {setting}"
            need = f"trained weights that only the optimizer writes: {reason}"
            problems.append(Problem(got, need, f"{attempt}, or {EDIT_ADVICE}"))
        if names := self._sorted_names(self._replaced - self._written):
            got = f"forward moves {describe_trained(names)} to another storage"
            attempt = "p.copy_(…), or another in-place function (its name ends in _)"
            problems.append(Problem(got, "weights that are changed in place", attempt))
        if names := self._sorted_names((self._untracked | changed) - self._replaced - self._written):
            got = f"forward writes {describe_trained(names)} without a torch function, such as through numpy"
            problems.append(Problem(got, "writes by torch functions, which can be observed", EDIT_ADVICE))
        return problems

    def _sorted_names(self, names: Collection[str]) -> list[str]:
        return [name for name in self.trained_names if name in names]
