"""Fake ranks: a tensor rank without peers, on the meta device: collectives have their shapes and no values.

Law: a model that is cut for a fake rank computes on tensors of the shapes that a rank of the same mesh computes on.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.torch_private import is_in_backward
from fourfold.words.layout import Change

META = torch.device("meta")


class RecordedCollective(NamedTuple):
    """A call of a collective. `whole_bytes`: of the tensor that is reduced or gathered."""

    change: Change
    whole_bytes: float
    in_backward: bool


class FakeTensorGroup:
    """See `TensorGroup`. The first of `size` ranks; `calls` are its collectives so far."""

    name, index = "fake ranks", 0

    def __init__(self, size: int) -> None:
        self.size, self.meter, self.calls = size, CommMeter(), list[RecordedCollective]()

    def _record(self, change: Change, whole_bytes: float) -> None:
        self.calls.append(RecordedCollective(change, whole_bytes, is_in_backward()))

    def meet(self, call: str) -> None:
        pass

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=META)

    def num_chunks(self, num_bytes: int) -> int:
        return 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._record(Change.ALL_REDUCE, tensor.nbytes)
        return tensor.contiguous()

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        reduced = self.all_reduce(tensor)
        return lambda: reduced

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self._record(Change.ALL_GATHER, tensor.nbytes * self.size)
        return torch.cat([tensor] * self.size, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self._record(Change.REDUCE_SCATTER, tensor.nbytes)
        return tensor.narrow(dim, 0, tensor.shape[dim] // self.size).contiguous()


class FakeTensorRanks:
    """Of a communicator, what the cut of a model needs: the first rank, to which all values are its own."""

    rank = 0

    def broadcast(self, tensor: Tensor) -> None:
        pass
