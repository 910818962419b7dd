"""What the buckets of a step need of the transport that reduces them."""

from typing import NamedTuple

import torch

from fourfold.plan.data.transport_request import TransportRequest
from fourfold.plan.data.zero import RESTING_LAYOUTS, RestingLayouts


class TransportSpec(NamedTuple):
    """One entry per bucket in `sizes` (elements), `dtypes` and `buffer_indices`.

    buffer_indices  buckets with the same index share one gradient buffer, one after the other
    num_scalars     room for the scalars of one all-reduce
    purpose         transports of one purpose share their process groups, and so the order of their collectives
    is_prereduced   a codec has already summed the buckets over all ranks that a process group connects
    num_shards      how many neighbouring ranks the split tensors are split among; None: all ranks
    weight_dtypes   dtypes of the weights, where they differ from `dtypes`, those of the gradient buffers
    """

    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    buffer_indices: tuple[int, ...]
    rest: RestingLayouts = RESTING_LAYOUTS[0]
    num_scalars: int = 8
    purpose: str = ""
    is_prereduced: bool = False
    num_shards: int | None = None
    weight_dtypes: tuple[torch.dtype, ...] | None = None

    def group_name(self, what: str) -> str:
        """The purpose under which this transport asks for a process group."""
        return f"{self.purpose} {what}".strip()


def spec_of_request(request: TransportRequest) -> TransportSpec:
    """What lowering asks of a transport, with torch's dtypes."""
    return TransportSpec(
        sizes=request.sizes,
        dtypes=tuple(getattr(torch, dtype) for dtype in request.dtypes),
        buffer_indices=request.buffer_indices,
        rest=request.resting_layouts,
        num_scalars=request.num_scalars,
        num_shards=request.num_shards,
        weight_dtypes=tuple(getattr(torch, dtype) for dtype in request.weight_dtypes),
    )
