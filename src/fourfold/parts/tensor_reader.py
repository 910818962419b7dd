"""Tensor readers: tensors that are loaded a part at a time, from memory or from files.

element  counted in row-major order, whatever the shape: a shard is a range of elements
Law: what is not asked for is not read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class TensorReader(Protocol):
    """A saved tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), flat. It may be memory that others read: copy it."""
        ...


class MemoryReader:
    """A tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._flat = tensor.detach().reshape(-1)
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self._flat[start:stop]


class ParameterState(NamedTuple):
    """The saved state of an optimizer for one parameter, by key."""

    tensors: Mapping[str, TensorReader]
    """As large as the parameter."""
    scalars: Mapping[str, Any]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset((*self.tensors, *self.scalars))
