"""Tensor readers: tensors that are loaded a part at a time, from memory or from files.

element  counted in row-major order, whatever the shape: a shard is a range of elements
part     a range of the elements of a box: where tensors are split along a dim, a range of elements is one of a box
Law: what is not asked for is not read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.plan.checkpoint_boxes import Part, Shape


class TensorReader(Protocol):
    """A saved tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), flat. It may be memory that others read: copy it."""
        ...

    def read_part(self, part: Part, shape: Shape) -> Tensor:
        """The elements of a part of the tensor viewed in this shape, flat. It may be memory that others read."""
        ...


class MemoryReader:
    """A tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._flat = tensor.detach().reshape(-1)
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self._flat[start:stop]

    def read_part(self, part: Part, shape: Shape) -> Tensor:
        return part_of(self._flat.view(shape), part)


def part_of(tensor: Tensor, part: Part) -> Tensor:
    """The elements of a part of a tensor, flat; a copy unless they lie in order."""
    box = tuple(slice(offset, offset + length) for offset, length in zip(*part.box, strict=True))
    return tensor[box].reshape(-1)[part.start : part.stop]


class ParameterState(NamedTuple):
    """The saved state of an optimizer for one parameter, by key."""

    tensors: Mapping[str, TensorReader]
    """As large as the parameter."""
    scalars: Mapping[str, Any]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset((*self.tensors, *self.scalars))
