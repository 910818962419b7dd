"""Rank layout: which elements of tensors as large as the parameters one rank holds, and how a whole tensor is made.

whole    every rank holds all elements
split    each rank holds its shard of every bucket; with hybrid sharding, several replicas hold the same shards
part     the elements of one parameter that a rank holds, flattened; there may be none
Law: whatever the layout, `gather` gives every rank the tensor whose parts the ranks hold.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.communicator import Communicator
from fourfold.comm.memory_order import shaped
from fourfold.comm.reduce.protocol import GradReducer, shard_addend


class ParamPart(NamedTuple):
    """Elements of a flattened parameter, from `start` on, where they rest."""

    start: int
    tensor: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()


class RankLayout(Protocol):
    """The layout of some tensors that are as large as the parameters: weights, master weights or optimizer states."""

    bucket_ranges: Sequence[tuple[int, int]]
    """By bucket: the elements [start, stop) that this rank holds."""
    ranges: Mapping[str, tuple[int, int]]
    """By parameter: the elements [start, stop) of its flattened form that this rank holds."""
    replica: tuple[int, int]
    """Which of how many ranks that hold the same elements this rank is."""

    def gather(self, name: str, part: Tensor) -> Tensor:
        """A copy of the whole tensor of which this rank has `part`, in its parameter's shape.

        Collective if split; the copy is then on the parameter's device.
        """
        ...

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; just this rank's if all ranks hold the same. Collective if split."""
        ...


class WholeLayout:
    """Every rank holds all elements: see `RankLayout`."""

    def __init__(self, parameters: Mapping[str, Tensor], buckets: Sequence[Bucket], data_ranks: Communicator) -> None:
        self._parameters = parameters
        self.bucket_ranges: Sequence[tuple[int, int]] = [(0, bucket.size) for bucket in buckets]
        self.ranges: Mapping[str, tuple[int, int]] = param_ranges(buckets, self.bucket_ranges)
        self.replica = data_ranks.rank, data_ranks.size

    @torch.no_grad()
    def gather(self, name: str, part: Tensor) -> Tensor:
        like = self._parameters[name]
        return part.clone() if part.shape == like.shape else shaped(part.clone(), like)

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


class SplitLayout:
    """Each rank holds the shard of every bucket that it updates: see `RankLayout`."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        reducer: GradReducer,
        data_ranks: Communicator,
    ) -> None:
        self._parameters, self._reducer, self._data_ranks = parameters, reducer, data_ranks
        self.bucket_ranges: Sequence[tuple[int, int]] = [reducer.grad_shard(bucket.index)[:2] for bucket in buckets]
        self.ranges: Mapping[str, tuple[int, int]] = param_ranges(buckets, self.bucket_ranges)
        start, stop = self.bucket_ranges[0] if buckets else (0, 0)
        # A stage whose weights are all frozen has no bucket: all its ranks hold the same, nothing.
        count = data_ranks.size * (stop - start) // buckets[0].size if buckets else data_ranks.size
        self.replica = (reducer.replica_index if buckets else data_ranks.rank), count

    @torch.no_grad()
    def gather(self, name: str, part: Tensor) -> Tensor:
        parameter, (start, _) = self._parameters[name], self.ranges[name]
        whole = torch.zeros(parameter.numel(), dtype=part.dtype, device=parameter.device)
        whole[start : start + part.numel()] = shard_addend(self._reducer, part)
        self._data_ranks.all_reduce(whole)
        return whole.view(parameter.shape)

    def gather_json(self, value: Any) -> list[Any]:
        return self._data_ranks.all_gather_json(value)


def param_ranges(buckets: Sequence[Bucket], bucket_ranges: Sequence[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """By parameter: the elements [start, stop) of its flattened form that lie in the ranges of their buckets."""
    return {
        slot.name: (max(start, slot.start) - slot.start, max(start, slot.start, min(stop, slot.stop)) - slot.start)
        for bucket, (start, stop) in zip(buckets, bucket_ranges, strict=True)
        for slot in bucket.slots
    }


def param_views(bucket: Bucket, start: int, flat: Tensor) -> dict[str, Tensor]:
    """By parameter: its part of a flat that holds a bucket's elements from `start` on; no copies."""
    return {slot.name: flat[max(0, slot.start - start) : max(0, slot.stop - start)] for slot in bucket.slots}
