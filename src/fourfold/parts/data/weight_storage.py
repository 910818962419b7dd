"""Weight storage: where trained weights rest, and which ranks hold them.

resident  each rank has all weights: copies of its own, or one that the ranks of a host share
sharded   each rank has its shard of every bucket, and parameters are placeholders between steps
Law: between steps every rank has rank 0's weights, or its shard of them, and each element is written by one rank of
its host.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.protocol import BucketSlice, WeightGatherer
from fourfold.parts.data.flat_params import flatten_params
from fourfold.parts.data.sharded_params import ShardedParams, UnshardSink
from fourfold.plan.data.buckets import Bucket


class WeightStorage(Protocol):
    """The weights that the model computes with."""

    shards: Sequence[BucketSlice]
    """By bucket: the part of its weights that this rank holds."""
    edit_loss_reason: str
    """Why training would not continue from weights that are written in place; empty if it would."""
    is_sharded: bool
    is_shared: bool
    """Whether the ranks of a host have one copy of the weights."""
    is_writer: bool
    """Whether this rank's copy is its own, or it writes its host's."""

    def broadcast(self) -> None:
        """Bring the first rank's weights to all. Collective."""
        ...

    def wait_written(self) -> None:
        """Return when every rank's writes can be read by the ranks that share them. Collective."""
        ...

    def private_copies(self) -> AbstractContextManager[None]:
        """Inside, parameters are whole, and any rank may write them; then all ranks get the first one's. Collective."""
        ...

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Replace weights, by name, as far as this rank holds them."""
        ...

    def local_shard(self, name: str) -> Tensor:
        """This rank's part of a parameter: the parameter itself, or flat."""
        ...

    def full_weight(self, name: str, shard: Tensor) -> Tensor:
        """A copy of the whole tensor of which `shard` is this rank's part, split as parameter `name` is. Collective."""
        ...

    def phase(self, kind: str, sink: UnshardSink) -> AbstractContextManager[None]:
        """Inside, the model may be called. Collective if weights rest split."""
        ...

    def plan_unshard(self, bucket: int, index: int) -> None:
        """The next phase unshards this bucket, after those that are planned already."""
        ...

    def use_orders(self) -> Mapping[str, Sequence[int]]:
        """By kind of phase: the buckets in the order in which its last phase unsharded them."""
        ...

    @property
    def num_out_of_turn(self) -> int:
        """How many unshards were in no program, where it had others."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, whole, one at a time; read only. Collective: all ranks iterate to the end."""
        ...


class ResidentWeights:
    """Every rank has all weights, in one flat per bucket: see `WeightStorage`."""

    is_sharded = False
    num_out_of_turn = 0

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        gatherer: WeightGatherer,
        data_ranks: Communicator,
    ) -> None:
        self._parameters, self._gatherer, self._data_ranks = parameters, gatherer, data_ranks
        flats = flatten_params(parameters, buckets, gatherer)
        self.shards: Sequence[BucketSlice] = [BucketSlice(0, flat.numel(), flat) for flat in flats]
        self.is_shared, self.is_writer = gatherer.shared_weights is not None, gatherer.is_writer
        self.edit_loss_reason = ""
        if self.is_shared and data_ranks.size > 1:
            self.edit_loss_reason = "the ranks of a host share these weights, and each rank would write them"

    def broadcast(self) -> None:
        if self.is_shared:
            self._gatherer.broadcast()
            return
        for shard in self.shards:
            self._data_ranks.broadcast(shard.flat)

    def wait_written(self) -> None:
        if self.is_shared:
            self._data_ranks.all_gather_json(None)

    @contextlib.contextmanager
    def private_copies(self) -> Iterator[None]:
        views = (
            {name: p.data for name, p in self._parameters.items()} if self.is_shared and self._data_ranks.rank else {}
        )
        for name in views:
            self._parameters[name].data = views[name].clone()
        self.wait_written()  # all copies are made, the first rank may write
        try:
            yield
        finally:
            for name, view in views.items():
                self._parameters[name].data = view
        self.broadcast()

    def load(self, values: Mapping[str, Tensor]) -> None:
        if self.is_writer:
            for name, value in values.items():
                self._parameters[name].copy_(value)

    def local_shard(self, name: str) -> Tensor:
        return self._parameters[name].detach()

    def full_weight(self, name: str, shard: Tensor) -> Tensor:
        return shard.clone()

    def phase(self, kind: str, sink: UnshardSink) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def plan_unshard(self, bucket: int, index: int) -> None:
        raise AssertionError("weights rest whole")

    def use_orders(self) -> Mapping[str, Sequence[int]]:
        return {}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._parameters.items():
            yield name, p.detach()


class ShardedWeights:
    """Every rank has its shard of every bucket, and parameters are placeholders: see `WeightStorage`."""

    is_sharded, is_shared, is_writer = True, False, True
    edit_loss_reason = "between steps the parameters are placeholders, and the weights rest split"

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], sharded_params: ShardedParams, data_ranks: Communicator
    ) -> None:
        self._parameters, self._data_ranks = parameters, data_ranks
        self.sharded_params = sharded_params
        self.shards: Sequence[BucketSlice] = sharded_params.shards

    def broadcast(self) -> None:
        self.sharded_params.shard_params(self._data_ranks.broadcast)

    def wait_written(self) -> None:
        pass

    @contextlib.contextmanager
    def private_copies(self) -> Iterator[None]:
        with self.sharded_params.all_unsharded():
            yield
            self.broadcast()

    def load(self, values: Mapping[str, Tensor]) -> None:
        self.sharded_params.load_weights(values)

    def local_shard(self, name: str) -> Tensor:
        return self.sharded_params.local_shard(name)

    @torch.no_grad()
    def full_weight(self, name: str, shard: Tensor) -> Tensor:
        whole = self.sharded_params.pad_to_full(name, shard, self._parameters[name])
        self._data_ranks.all_reduce(whole)
        return whole.view(self._parameters[name].shape)

    def phase(self, kind: str, sink: UnshardSink) -> AbstractContextManager[None]:
        return self.sharded_params.phase(kind, sink)

    def plan_unshard(self, bucket: int, index: int) -> None:
        self.sharded_params.plan_unshard(bucket, index)

    def use_orders(self) -> Mapping[str, Sequence[int]]:
        return {kind: tuple(order.buckets) for kind, order in self.sharded_params.unshard_orders.items()}

    @property
    def num_out_of_turn(self) -> int:
        return self.sharded_params.num_out_of_turn

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, flat in self.sharded_params.unsharded_buckets():
            for name, start, stop in bucket.slots:
                yield name, flat[start:stop].view(self._parameters[name].shape)
