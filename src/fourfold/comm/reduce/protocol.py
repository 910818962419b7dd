"""Transport: what the data ranks of a step do for each other: protocols, and `scalars`.

GradReducer      sums buckets of gradients over the data ranks
WeightGatherer   brings weights together that ranks have updated
WeightUnsharder  brings weights together before use, where they rest split

buffer   this rank's flat gradient of a bucket; where gradients rest split, several buckets use one after the other
launch   `reduce_async`: this rank's buffer is complete; launches come in program order, the same on every rank
sum      a bucket's buffers added over the ranks; `reduced_views` says where it lies
factor   what every sum is multiplied by where states rest whole: it is known once the totals of the step are
shard    the part of every bucket that a rank updates where optimizer states rest split; shards are of equal length
Law: every rank begins the same reductions, gathers and scalars in the same order. A sum that needs the factor stays
queued until a call gives it; it is multiplied where it is made, once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, RestingLayouts, TransportRequest
from fourfold.comm.reduce.scalars import ScalarReducer

# ---- what is asked of a transport ----------------------------------------------------------------------------------


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


# ---- what a transport does -----------------------------------------------------------------------------------------


class BucketSlice(NamedTuple):
    """The range [start, stop) of a bucket, in elements, and the tensor that holds it."""

    start: int
    stop: int
    flat: Tensor


class GradReducer(Protocol):
    """Sums buckets of gradients over the data ranks.

    Each call that may advance sums takes the factor, None while it is not known: 1 if the update multiplies by it.
    Where states rest split no sum needs it.
    """

    size: int
    """How many ranks the sums are over."""
    grad_buffers: Sequence[Tensor]
    """This rank's flat gradient of each bucket. Buckets with the same buffer index share memory."""
    buffer_indices: tuple[int, ...]
    replica_index: int
    """With hybrid sharding, every shard exists on several ranks: which of these replicas this rank belongs to."""

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        """Wait until this rank may write its buffer of `bucket`."""
        ...

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        """Whether `acquire_buffer` and `reduce_async` would return at once. May do this rank's part of reductions."""
        ...

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        """This rank's buffer of `bucket` is complete: begin to reduce it. Does not wait.

        `reduction_index` identifies the reduction in the trace; None: it is no reduction of gradients.
        """
        ...

    def wait_reduce(self, bucket: int, factor: float) -> None:
        """Wait until the sum of a launched bucket is there, or until `reduce_range` can make it."""
        ...

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        """Whether `wait_reduce` would return at once, with this factor. May do this rank's part of reductions.

        False without a factor that the sum needs.
        """
        ...

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        """Make the sum of [start, stop), inside this rank's shard of a reduced bucket, and multiply it by `factor`."""
        ...

    def reduce_shard(self, bucket: int) -> None:
        """Make the sum of this rank's whole shard of a reduced bucket."""
        ...

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        """Where a bucket's sum lies: always the same tensors. Only this rank's shard where states rest split."""
        ...

    def grad_shard(self, bucket: int) -> BucketSlice:
        """The part of a bucket's sum that this rank takes norms of and scales; ranks' parts cover the bucket once."""
        ...

    def scale_grads(self, factor: float) -> None:
        """Multiply every sum by a factor that is the same on all ranks. Only where states rest whole."""
        ...

    def all_gather_grads(self, bucket: int) -> None:
        """Bring the whole sum into this rank's buffer. Only where states rest whole."""
        ...

    def end_step(self) -> None:
        """This rank needs the sums of this step no more."""
        ...


def scale_range(shard: BucketSlice, start: int, stop: int, factor: float) -> None:
    """Multiply elements [start, stop) of a bucket, all of them this rank's, by a factor."""
    if factor != 1.0:
        shard.flat[start - shard.start : stop - shard.start].mul_(factor)


def shard_addend(reducer: GradReducer, values: Tensor) -> Tensor:
    """This rank's addend of a sum over shards: of the replicas of a shard, the first one adds it."""
    return torch.zeros_like(values) if reducer.replica_index else values


class WeightGatherer(Protocol):
    """Brings the weights of buckets together, over the ranks that each update a shard of them."""

    size: int
    """How many ranks there are."""
    shared_weights: Sequence[Tensor] | None
    """The flat weights of each bucket, if they exist once per host; None if every rank has its own."""
    is_writer: bool
    """Whether this rank writes initial and loaded values into `shared_weights` for its host."""
    unshards_params: bool
    """Whether weights rest split among ranks that do not share memory, so that there is a `WeightUnsharder`."""

    def signal_backward_done(self) -> None:
        """This rank has ended backward, and reads the weights of this step no more. Does not wait."""
        ...

    def wait_writable(self) -> None:
        """Wait until weights may be written: if they exist once per host, until all its ranks have ended backward."""
        ...

    def can_gather(self) -> bool:
        """Whether `all_gather_async` would return at once."""
        ...

    def all_gather_async(self, bucket: int, weight: Tensor) -> None:
        """This rank has updated its shard of a bucket's weights: begin to send it to all ranks. In program order."""
        ...

    def wait(self, bucket: int) -> None:
        """Wait until every rank's shard of a gathered bucket is new. `end_step` waits for all buckets."""
        ...

    def broadcast(self) -> None:
        """Bring rank 0's `shared_weights` to every host, if there are any. Collective."""
        ...

    def end_step(self) -> None:
        """The weights are whole when this returns."""
        ...


class WeightUnsharder(Protocol):
    """Brings together the weights of buckets that rest split, before they are used."""

    def unshard_async(self, bucket: int, shard: Tensor, out: Tensor, unshard_index: int | None) -> Callable[[], None]:
        """Begin to gather a bucket's weights, of which this rank has `shard`, into `out`. Returns the wait.

        All ranks gather the same buckets in the same order, and wait for them in that order. `unshard_index`: under
        which the gather is recorded; None: it is not.
        """
        ...

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, in rank order. Waits."""
        ...


class DataTransport(NamedTuple):
    """What the data ranks do together. `description`: what joins them, and why, in words."""

    grads: GradReducer
    weights: WeightGatherer
    scalars: ScalarReducer
    description: str
    unsharder: WeightUnsharder | None = None
    """Where weights rest split among ranks that do not share memory."""

    def end_step(self) -> None:
        """This rank needs the sums of this step no more. The weights are whole when this returns."""
        self.grads.end_step()
        self.weights.end_step()


GradsOfBucket = Callable[[int], Sequence[Tensor]]
"""The gradients of a bucket, where they have no buffers."""
