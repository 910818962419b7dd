"""Weight storage: where trained weights rest, and which ranks hold them.

resident     each rank has all weights, in copies of its own
host-shared  each rank has all weights, in one copy that the ranks of a host share
sharded      each rank has its shard of every bucket, and parameters are placeholders between steps
flat         one-dimensional memory of a bucket; each parameter of the bucket becomes a view of its slot
Law: between steps every rank has rank 0's weights, or its shard of them, and each element is written by one rank of
its host.
Law: a parameter keeps its values, its shape and its memory order.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.work.sharded_params import ShardedParams, UnshardSink
from fourfold.comm.communicator import Communicator
from fourfold.comm.memory_order import shaped
from fourfold.comm.rank_layout import ParamPart, RankLayout, WholeLayout, param_views
from fourfold.comm.reduce.protocol import BucketSlice, WeightGatherer
from fourfold.plan.param_spec import ParamSpec, TensorShard
from fourfold.torch_kit import memory
from fourfold.torch_kit.mixed_precision import bucket_dtype

# ---- flats ---------------------------------------------------------------------------------------------------------

NO_SHARDS: Mapping[str, Sequence[TensorShard]] = {}


def param_specs(
    parameters: Mapping[str, nn.Parameter],
    groups: Mapping[str, int],
    shards: Mapping[str, Sequence[TensorShard]] = NO_SHARDS,
) -> list[ParamSpec]:
    """The trainable parameters, in order of definition.

    groups  their optimizer groups by name; 0 if left out
    shards  by name: the parts that the places of the tensor axis hold; empty: every rank has whole parameters
    """
    specs = []
    for name, p in parameters.items():
        dtype, held = str(p.dtype).removeprefix("torch."), tuple(shards.get(name, ()))
        shape = held[0].shape if held else tuple(p.shape)
        specs.append(ParamSpec(name, shape, dtype, p.element_size(), groups.get(name, 0), shards=held))
    return specs


@torch.no_grad()
def flatten_params(
    parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], gatherer: WeightGatherer
) -> Sequence[Tensor]:
    """Move the weights into one flat per bucket, and return the flats: shared ones if the gatherer has them."""
    flats = gatherer.shared_weights
    if flats is None:
        devices = [parameters[bucket.slots[0].name].device for bucket in buckets]
        flats = [memory.allocate_private(b.size, bucket_dtype(b), d) for b, d in zip(buckets, devices, strict=True)]
    for bucket, flat in zip(buckets, flats, strict=True):
        for slot in bucket.slots:
            parameter = parameters[slot.name]
            view = shaped(flat[slot.start : slot.stop], parameter)
            if gatherer.is_writer:
                view.copy_(parameter)
            parameter.data = view
    return flats


# ---- storages ------------------------------------------------------------------------------------------------------


class ResidentWeights:
    """The weights that the model computes with: here every rank has all of them to itself, in one flat per bucket."""

    num_out_of_turn = 0
    """How many unshards were in no program, where it had others."""
    edit_loss_reason = ""
    """Why training would not continue from weights that are written in place; empty if it would."""
    forward_loss_reason = ""
    """The same of weights that forward writes."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        gatherer: WeightGatherer,
        data_ranks: Communicator,
    ) -> None:
        flats = flatten_params(parameters, buckets, gatherer)
        self.shards: Sequence[BucketSlice] = [BucketSlice(0, flat.numel(), flat) for flat in flats]
        """By bucket: the part of its weights that this rank holds."""
        self.layout: RankLayout = WholeLayout(parameters, buckets, data_ranks)
        self.whole_params = parameters
        """The parameters that have their weights between steps: all, or none."""
        self._gatherer, self._data_ranks = gatherer, data_ranks
        self._written = parameters if gatherer.is_writer else {}

    def broadcast(self) -> None:
        """Bring the first rank's weights to all. Collective."""
        for shard in self.shards:
            self._data_ranks.broadcast(shard.flat)

    def wait_written(self) -> None:
        """Return when every rank's writes can be read by the ranks that share them. Collective."""

    @contextlib.contextmanager
    def private_copies(self) -> Iterator[None]:
        """Inside, parameters are whole, and any rank may write them; then all ranks get the first one's. Collective."""
        yield
        self.broadcast()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Replace weights, by name, as far as this rank writes them."""
        for name in values.keys() & self._written.keys():
            self._written[name].copy_(values[name])

    def local_shard(self, name: str) -> Tensor:
        """This rank's part of a parameter: the parameter itself, or flat."""
        return self.whole_params[name].detach()

    def held_parts(self, name: str) -> Sequence[ParamPart]:
        """The part of a parameter that this rank writes, if any; the parameter itself if that is all of it."""
        # Not a view: an update may still wait for the parameter's next use.
        return [ParamPart(0, self._written[name])] if name in self._written else []

    def phase(self, kind: str, stage: int, sink: UnshardSink) -> AbstractContextManager[None]:
        """Inside, a stage of the model may be called. Collective if weights rest split."""
        return contextlib.nullcontext()

    def plan_unshard(self, bucket: int, index: int) -> None:
        """The next phase unshards this bucket, after those that are planned already."""
        raise AssertionError("weights rest whole")

    def use_orders(self) -> Mapping[str, Sequence[int]]:
        """By kind of phase: the buckets in the order in which the stages' last phases unsharded them."""
        return {}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, whole, one at a time; read only. Collective: all ranks iterate to the end."""
        for name, p in self.whole_params.items():
            yield name, p.detach()


class HostSharedWeights(ResidentWeights):
    """The ranks of a host share one copy of all weights, in one flat per bucket."""

    edit_loss_reason = "the ranks of a host share these weights, and each rank would write them"
    forward_loss_reason = "the ranks of a host share one copy, and each rank would write it"

    def broadcast(self) -> None:
        self._gatherer.broadcast()

    def wait_written(self) -> None:
        self._data_ranks.all_gather_json(None)

    @contextlib.contextmanager
    def private_copies(self) -> Iterator[None]:
        views = {name: p.data for name, p in self.whole_params.items()} if self._data_ranks.rank else {}
        for name in views:
            self.whole_params[name].data = views[name].clone()
        self.wait_written()  # all copies are made, the first rank may write
        try:
            yield
        finally:
            for name, view in views.items():
                self.whole_params[name].data = view
        self.broadcast()


class ShardedWeights:
    """Every rank has its shard of every bucket, and parameters are placeholders: see `ResidentWeights`."""

    edit_loss_reason = "between steps the parameters are placeholders, and the weights are stored split"
    forward_loss_reason = "they are all-gathered for each use, and a write into them is lost"

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        sharded_params: ShardedParams,
        layout: RankLayout,
        data_ranks: Communicator,
    ) -> None:
        self._parameters, self._data_ranks = parameters, data_ranks
        self.sharded_params, self.layout = sharded_params, layout
        self.shards: Sequence[BucketSlice] = sharded_params.shards
        self.whole_params: Mapping[str, nn.Parameter] = {}
        self._parts: dict[str, Tensor] = {}
        for bucket, shard in zip(buckets, self.shards, strict=True):
            self._parts |= param_views(bucket, shard.start, shard.flat)

    def broadcast(self) -> None:
        self.sharded_params.shard_params(self._data_ranks.broadcast)

    def wait_written(self) -> None:
        pass

    @contextlib.contextmanager
    def private_copies(self) -> Iterator[None]:
        with self.sharded_params.all_unsharded():
            yield
            self.broadcast()

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parts[name].copy_(value.detach().reshape(-1)[slice(*self.layout.ranges[name])])

    def local_shard(self, name: str) -> Tensor:
        return self._parts[name]

    def held_parts(self, name: str) -> Sequence[ParamPart]:
        return [ParamPart(self.layout.ranges[name][0], self._parts[name])]

    def phase(self, kind: str, stage: int, sink: UnshardSink) -> AbstractContextManager[None]:
        return self.sharded_params.phase(kind, stage, sink)

    def plan_unshard(self, bucket: int, index: int) -> None:
        self.sharded_params.plan_unshard(bucket, index)

    def use_orders(self) -> Mapping[str, Sequence[int]]:
        orders: dict[str, tuple[int, ...]] = {}
        for (kind, _), order in self.sharded_params.unshard_orders.items():
            orders[kind] = (*orders.get(kind, ()), *order.buckets)
        return orders

    @property
    def num_out_of_turn(self) -> int:
        return self.sharded_params.num_out_of_turn

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, flat in self.sharded_params.unsharded_buckets():
            for name, start, stop in bucket.slots:
                yield name, flat[start:stop].view(self._parameters[name].shape)


WeightStorage = ResidentWeights | ShardedWeights
