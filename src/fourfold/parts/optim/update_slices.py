"""Update slices: the parts of a bucket that one update works on, each with the place of its reduced gradient.

slice  elements [start, stop) of a bucket, inside one parameter where parameters are told from each other
Law: the slices of a bucket tile the elements that this rank updates.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fourfold.parts.comm.reduce.protocol import BucketSlice, GradReducer
from fourfold.parts.optim.master_weights import MasterWeights
from fourfold.plan.data.buckets import Bucket

MAX_SLICE_ELEMENTS = 2**18
"""1 MiB of float32: small enough that a slice stays in the cache while it is summed, scaled and updated."""
MAX_SLICE_ELEMENTS_ON_GPUS = 2**24
"""64 MiB of float32: a GPU works on it for as long as the host takes to launch its kernels. A converted gradient is as
large as a slice."""


class UpdateSlice(NamedTuple):
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int
    weight: Tensor
    """What the update changes."""
    gradient: Tensor | nn.Parameter
    """Where the sum of the gradients rests. A parameter stands for what its `.grad` holds at the time of the update."""
    slot_index: int | None = None
    """The parameter's index in the bucket, if slices are cut by parameter."""
    model_weight: Tensor | None = None
    """If `weight` is a master weight: the weight that the model computes with."""

    @property
    def converts_grad(self) -> bool:
        """Whether the gradient is converted before the update: to another dtype or device, or for a master weight."""
        weight, gradient = self.weight, self.gradient
        is_same_kind = gradient.dtype == weight.dtype and gradient.device == weight.device
        return self.model_weight is not None or not is_same_kind

    @property
    def is_unbucketed(self) -> bool:
        """Whether the gradient is where autograd leaves it."""
        return isinstance(self.gradient, nn.Parameter)


def update_slices(
    shards: Sequence[BucketSlice],
    master_weights: MasterWeights,
    buckets: Sequence[Bucket],
    reducer: GradReducer,
    *,
    split_by_param: bool,
    is_chunked: bool,
) -> list[list[UpdateSlice]]:
    """The slices of each bucket: weights paired with the sums of their gradients.

    There is one slice for each view of the sum. `split_by_param` cuts them at the slots too, so that a parameter can be
    left out. `is_chunked` cuts them into slices of limited size; so are those whose gradients are converted.
    """
    result: list[list[UpdateSlice]] = []
    for bucket, shard, master in zip(buckets, shards, master_weights.by_bucket, strict=True):
        slots = [(slot.start, slot.stop) for slot in bucket.slots] if split_by_param else [(0, bucket.size)]
        updated = shard.flat if master is None else master.flat
        most = MAX_SLICE_ELEMENTS if updated.device.type == "cpu" else MAX_SLICE_ELEMENTS_ON_GPUS
        result.append([])
        for slot_index, (slot_start, slot_stop) in enumerate(slots):
            for view in reducer.reduced_views(bucket.index):
                low, high = max(slot_start, view.start), min(slot_stop, view.stop)
                is_limited = is_chunked or master is not None or view.flat.dtype != shard.flat.dtype
                size = most if is_limited else max(1, high - low)
                for start in range(low, high, size):
                    stop = min(start + size, high)
                    gradient = view.flat[start - view.start : stop - view.start]
                    model_weight = shard.flat[start - shard.start : stop - shard.start]
                    pair = (model_weight, None) if master is None else (master.view_range(start, stop), model_weight)
                    index = slot_index if split_by_param else None
                    result[-1].append(UpdateSlice(start, stop, pair[0], gradient, index, pair[1]))
    return result
