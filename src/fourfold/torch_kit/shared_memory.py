"""Shared memory of weights: trained parameters that another tensor of their model overlaps.

overlap  two tensors have an element of memory in common; views of one storage that have none do not overlap
Law: a tied weight is one parameter with two names. What overlaps it otherwise does not follow when it is moved, or
copied.

A tensor that only a function's closure holds is not found.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.torch_kit.deferred_init import Handle
from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import has_memory, is_wrapper, storage_key
from fourfold.words.errors import Problem, TaskError

_REGISTRIES = {"_parameters", "_buffers", "_modules"}
_COMPUTED = "_orig"
"""Of spectral_norm and pruning: NAME is computed from the weight NAME_orig before each forward, and replaced."""


class _Extent(NamedTuple):
    """The bytes [start, stop) from a tensor's first element to its last. `base`: of what memory."""

    base: tuple[str, int]
    start: int
    order: int
    stop: int
    name: str
    tensor: Tensor
    is_trained: bool


def check_weights_apart(model: nn.Module) -> None:
    """Raise TaskError if a trained parameter of a model overlaps another tensor of it."""
    with untracked_access():
        found = list(_overlaps(sorted(_extents(model), key=lambda each: each[:3])))
    if not found:
        return
    (trained, other), others = found[0], len(found) - 1
    more = f", and {others} more such pair{'s' if others > 1 else ''}" if others else ""
    got = f"{trained.name} and {other.name} share memory, and are not one parameter{more}"
    need = "trained weights with memory of their own: they are moved into buckets, and nothing else follows"
    is_weight = isinstance(other.tensor, nn.Parameter)
    one = f"one parameter under both names ({other.name} = {trained.name})" if is_weight else f"{trained.name} itself"
    raise TaskError(Problem(got, need, f"{one}, or a .clone()"), where="the model")


def _extents(model: nn.Module) -> Iterator[_Extent]:
    """The trained parameters of a model, and all other tensors of its modules, once each."""
    seen = set[int]()
    for name, tensor, is_trained in _named_tensors(model):
        if id(tensor) not in seen and _has_elements(tensor):
            seen.add(id(tensor))
            data = tensor.meta if isinstance(tensor, Handle) else tensor
            base = (str(data.device), storage_key(data) if data.is_meta else 0)
            start = int(data.storage_offset()) * data.element_size() if data.is_meta else data.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
            yield _Extent(base, start, len(seen), start + (last + 1) * data.element_size(), name, tensor, is_trained)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in model.named_parameters():
        yield name, parameter, parameter.requires_grad
    for name, buffer in model.named_buffers():
        yield name, buffer, False
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            for tensor in tree_leaves(value) if name not in _REGISTRIES else ():
                yield f"{prefix}.{name}".removeprefix("."), tensor, False


def _has_elements(tensor: Tensor) -> bool:
    """Whether a tensor has memory for each element. A placeholder, one element that is expanded, has not."""
    if isinstance(tensor, Handle):
        return tensor.numel() > 0
    if is_wrapper(tensor) or not has_memory(tensor) or torch.nn.parameter.is_lazy(tensor):
        return False
    return tensor.numel() > 0 and not (tensor.numel() > 1 and not any(tensor.stride()))


def _overlaps(extents: list[_Extent]) -> Iterator[tuple[_Extent, _Extent]]:
    """The pairs that overlap: a trained one first, of two trained ones the one that was defined first."""
    open_: list[_Extent] = []
    for each in extents:
        open_ = [other for other in open_ if other.base == each.base and other.stop > each.start]
        for other in open_:
            trained, second = sorted((each, other), key=lambda extent: (not extent.is_trained, extent.order))
            is_replaced = trained.name == f"{second.name}{_COMPUTED}"
            if trained.is_trained and not is_replaced and _have_common_bytes(trained, second):
                yield trained, second
        open_.append(each)


def _have_common_bytes(a: _Extent, b: _Extent) -> bool:
    """Of two tensors whose extents overlap: whether the tensors do."""
    if all(each.tensor.nbytes == each.stop - each.start for each in (a, b)):
        return True
    start = min(a.start, b.start)
    taken = torch.zeros(max(a.stop, b.stop) - start, dtype=torch.bool)
    ours, others = (_bytes_of(each, taken, each.start - start) for each in (a, b))
    ours.fill_(True)
    return bool(others.any())


def _bytes_of(extent: _Extent, taken: Tensor, offset: int) -> Tensor:
    """What of `taken`, one element for each byte, is a tensor's."""
    size = extent.tensor.element_size()
    strides = [stride * size for stride in extent.tensor.stride()]
    return taken.as_strided((*extent.tensor.shape, size), (*strides, 1), offset)
