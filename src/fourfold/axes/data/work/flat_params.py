"""Flat parameters: the weights of a model move into one flat per bucket.

flat  one-dimensional memory of a bucket; each parameter of the bucket becomes a view of its slot
Law: a parameter keeps its values, its shape and its memory order.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.memory_order import shaped
from fourfold.comm.reduce.protocol import WeightGatherer
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.tensor_shard import TensorShard
from fourfold.torch_kit import memory
from fourfold.torch_kit.dtypes import bucket_dtype

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
