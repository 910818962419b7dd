"""Trees: a batch as a skeleton of plain values, and its tensors laid end to end.

tree    the dicts, lists and tuples of a batch with its numbers and texts; a tensor stands there as its number
place   where a tensor lies in the memory of its batch, and in which shape and strides
Law: `build` of what `lay_out` says, over the same bytes, has the types, values, shapes and dtypes of the batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
MAX_INT = 2**63


class NotSharable(Exception):
    """A batch holds what only its own process can hold; the text says what."""


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """`start`: in bytes. A tensor of n elements takes n times its element size, whatever its strides."""

    dtype: str
    shape: list[int]
    strides: list[int]
    start: int


class LaidOut(NamedTuple):
    """`num_bytes`: of all tensors, with the gaps between them."""

    tree: Any
    places: list[TensorPlace]
    tensors: list[Tensor]
    num_bytes: int


def lay_out(batch: Any) -> LaidOut:
    """The skeleton of a batch, and where its tensors are to lie. Raises NotSharable."""
    tensors: list[Tensor] = []
    tree = _skeleton(batch, tensors)
    places, start = [], 0
    for tensor in tensors:
        # As a copy of the tensor would lie: dense, its dims in the same order.
        strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(dtype, list(tensor.shape), list(strides), start))
        start += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return LaidOut(tree, places, tensors, start)


def tensor_at(place: TensorPlace, content: Tensor) -> Tensor:
    """The tensor at a place of `content`, uint8 [bytes]."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    num_elements = 1
    for size in place.shape:
        num_elements *= size
    if num_elements == 0:
        return torch.empty_strided(place.shape, place.strides, dtype=dtype)
    flat = content[place.start : place.start + num_elements * dtype.itemsize].view(dtype)
    return flat.as_strided(place.shape, place.strides, flat.storage_offset())


def build(tree: Any, places: Sequence[TensorPlace], content: Tensor) -> Any:
    """The batch of a skeleton, its tensors views of `content`."""
    return _fill(tree, [tensor_at(place, content) for place in places])


def _skeleton(value: Any, tensors: list[Tensor]) -> Any:
    """`[kind, content]`: of a dict [key, part] pairs, of a list or tuple its parts, of a tensor its number."""
    kind = type(value)
    if isinstance(value, Tensor):
        _check_tensor(value)
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, Mapping) and kind is dict:
        for key in value:
            _check_value(key)
        return ["dict", [[key, _skeleton(part, tensors)] for key, part in value.items()]]
    if kind is list or kind is tuple:
        return [kind.__name__, [_skeleton(part, tensors) for part in value]]
    _check_value(value)
    return ["value", value]


def _check_tensor(tensor: Tensor) -> None:
    if type(tensor) is not Tensor:
        raise NotSharable(f"a {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise NotSharable(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")


def _check_value(value: Any) -> None:
    is_int = type(value) is int and -MAX_INT <= value < MAX_INT
    if not (value is None or is_int or type(value) in (bool, float, str, bytes)):
        raise NotSharable(f"a {type(value).__name__}")


def _fill(tree: Any, tensors: Sequence[Tensor]) -> Any:
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _fill(part, tensors) for key, part in content}
    if kind == "value":
        return content
    parts = [_fill(part, tensors) for part in content]
    return parts if kind == "list" else tuple(parts)
