"""Fake ranks: a tensor or context rank without peers: messages have their shapes and no values.

Law: a fake rank computes on tensors of the shapes that a rank of the same mesh computes on, and holds as many bytes.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fourfold.comm.channel import MessageChannel
from fourfold.comm.collectives import Group, Work
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import GroupPlace
from fourfold.torch_kit.torch_private import is_in_backward
from fourfold.words.layout import Change

META = torch.device("meta")
MAX_HOPS = 2


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


class FakeGroup:
    """Of `Group`, what a channel needs: one rank of which only this one exists. Messages take memory."""

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        return Work(lambda: out)

    def all_to_all(self, out: Tensor, flat: Tensor) -> Work:
        return Work(lambda: out)

    def shift(self, flat: Tensor, tag: int) -> Work:
        taken = torch.empty_like(flat)
        return Work(lambda: taken)


class FakeChannel(MessageChannel):
    """One of `size` ranks, of which only this one exists. `max_hops`: further blocks of an iteration hold no more."""

    def __init__(self, size: int, index: int = 0, *, max_hops: int | None = None) -> None:
        place = GroupPlace(index, tuple(range(size)))
        super().__init__(CommMeter(), cast(Group, FakeGroup()), place, name="fake ranks")
        self._max_hops = size if max_hops is None else max_hops

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        return itertools.islice(super().iterate_blocks(parts), self._max_hops + 1)
