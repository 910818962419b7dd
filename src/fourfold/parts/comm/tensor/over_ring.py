"""Tensor group over a ring group: each rank gathers all parts and adds them in rank order."""

import functools

import torch
from torch import Tensor

from fourfold.parts.comm.ring.protocol import RingGroup, reduce_scatter


class TensorGroupOverRing:
    """See `TensorGroup`."""

    def __init__(self, ring: RingGroup) -> None:
        self._ring = ring
        self.name, self.size, self.index, self.meter = ring.name, ring.size, ring.index, ring.meter

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return [part.view(tensor.shape) for part in self._ring.all_gather((tensor,))]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return functools.reduce(torch.add, self._parts(tensor))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return functools.reduce(torch.maximum, self._parts(tensor))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._parts(tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        parts = torch.stack(tensor.chunk(self.size, dim))
        return reduce_scatter(self._ring, parts.view(self.size, -1)).view(parts[0].shape)
