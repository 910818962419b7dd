"""Transport request: what the ranks that sum gradients need of the transport that joins them.

Law: a transport is made from a request alone; it learns nothing else of the plan.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.rules.zero import RestingLayouts, grad_buffer_indices
from fourfold.words.layout import SPLIT

MIN_SCALARS = 8  # the loss and the counts of a step


class TransportRequest(NamedTuple):
    """One entry per bucket in `sizes` (elements), `dtypes`, `buffer_indices` and `weight_dtypes`.

    dtypes           of the gradient buffers
    buffer_indices   buckets with the same index share one gradient buffer, one after the other
    resting_layouts  as the plan has them, if anything can be split at all; a transport that keeps the weights once per
                     host need not gather them
    num_scalars      room for the scalars of one all-reduce
    num_shards       how many neighbouring ranks the split tensors are split among; None: nothing rests split
    """

    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    buffer_indices: tuple[int, ...]
    resting_layouts: RestingLayouts
    num_scalars: int
    num_shards: int | None
    weight_dtypes: tuple[str, ...]


def request_transport(
    buckets: Sequence[Bucket],
    gradient_buckets: Sequence[Bucket],
    resting_layouts: RestingLayouts,
    *,
    num_shards: int,
    num_scalars: int,
) -> TransportRequest:
    """The request of these buckets; `gradient_buckets` have the dtypes in which gradients are summed."""
    return TransportRequest(
        sizes=tuple(bucket.size for bucket in buckets),
        dtypes=tuple(bucket.dtype for bucket in gradient_buckets),
        buffer_indices=grad_buffer_indices(len(buckets), is_cyclic=resting_layouts.gradient == SPLIT),
        resting_layouts=resting_layouts,
        num_scalars=max(MIN_SCALARS, num_scalars),
        num_shards=num_shards if resting_layouts.state == SPLIT else None,
        weight_dtypes=tuple(bucket.dtype for bucket in buckets),
    )
