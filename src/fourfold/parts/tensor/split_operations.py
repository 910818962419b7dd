"""Split operations: functions of logits that can be computed of each rank's logits.

Law: each gives None, or what the same function of the whole logits gives: the source of split logits, or a loss.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.parts.tensor.class_loss import split_class_loss
from fourfold.parts.tensor.cross_entropy import cross_entropy, split_cross_entropy
from fourfold.parts.tensor.logits_source import Source

Operation = Callable[[Any, Source, tuple[Any, ...], dict[str, Any]], Source | Tensor | None]


def _index(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    (index,) = copy.deepcopy(args)  # the whole logits may be indexed later
    if not _leaves_classes(index if isinstance(index, tuple) else (index,), len(source.shape)):
        return None
    return source.derive(source.local[index], lambda whole: whole[index])


def _leaves_classes(index: tuple[Any, ...], num_dims: int) -> bool:
    """Whether an index takes all of the last dim, and leaves it the last one."""
    sizes = [_num_indexed(each) for each in index]
    if None in sizes:
        return False
    has_ellipsis = any(each is Ellipsis for each in index)
    num_indexed = sum(size for size in sizes if size is not None)
    if num_indexed < num_dims and not (has_ellipsis and index[-1] is not Ellipsis):
        return True
    return isinstance(index[-1], slice) and index[-1] == slice(None)


def _num_indexed(part: Any) -> int | None:
    """How many dims a part of an index indexes; None: not known."""
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, slice) or type(part) is int:
        return 1
    if isinstance(part, list) and all(type(each) is int for each in part):
        return 1
    if isinstance(part, Tensor):
        return part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
    return None


def _reshape(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    like = torch.empty(source.shape, dtype=source.dtype, device="meta")
    found = func(like, *args, **kwargs)
    if found.dtype != source.dtype or not found.dim() or found.shape[-1] != source.shape[-1]:
        return None
    reshape = Tensor.view if func is Tensor.view else Tensor.reshape
    local = reshape(source.local, *found.shape[:-1], source.local.shape[-1])
    return source.derive(local, lambda whole: reshape(whole, *found.shape))


def _cast(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    if kwargs.get("memory_format") is not None:
        return None
    found = func(source.local.new_empty(0, dtype=source.dtype), *args, **kwargs)
    if not found.is_floating_point() or found.device != source.local.device:
        return None
    # A loss computes in float32 anyway: half precision needs no wider copy.
    stays_narrow = found.dtype == torch.float32 and source.local.dtype in (torch.float16, torch.bfloat16)
    local = source.local.contiguous() if stays_narrow else func(source.wide_local, *args, **kwargs)
    return source.derive(local, lambda whole: func(whole, *args, **kwargs), found.dtype)


def _elementwise(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    if kwargs or not all(type(each) in (int, float) for each in args):
        return None
    return source.derive(func(source.wide_local, *args), lambda whole: func(whole, *args))


def _cross_entropy(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    (targets,) = args
    losses = split_cross_entropy(source.local, targets, source.vocabulary, **kwargs)
    source.family.has_split_loss = True
    return losses.to(torch.promote_types(source.dtype, torch.float32))


def _torch_cross_entropy(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    loss = split_class_loss(source.local, source.vocabulary, source.dtype, args, kwargs)
    source.family.has_split_loss |= loss is not None
    return loss


_CASTS = (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.contiguous)
_ELEMENTWISE = (
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul),
    *(Tensor.div, Tensor.__truediv__, torch.div),
    *(Tensor.tanh, torch.tanh),
)
SPLIT_OPERATIONS: Mapping[Any, Operation] = {
    Tensor.__getitem__: _index,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshape),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    cross_entropy: _cross_entropy,
    F.cross_entropy: _torch_cross_entropy,
}
"""By function: what takes the function, the source of its first argument, and the other arguments."""
