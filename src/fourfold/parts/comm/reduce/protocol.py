"""Transport: reduces buckets of gradients over the data ranks, and moves weights and scalars between them.

buffer   this rank's flat gradient of a bucket; where gradients rest split, several buckets use one after the other
launch   `reduce_async`: this rank's buffer is complete; launches come in program order, the same on every rank
sum      a bucket's buffers added over the ranks; `reduced_views` says where it lies
shard    the part of every bucket that a rank updates where optimizer states rest split; shards are of equal length
scalars  a few float64 values summed over the ranks
call     a collective call and its step, such as "evaluate() after step 6"; see `collective_fingerprint`
Law: every rank begins the same reductions, gathers and scalars in the same order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from fourfold.words.trace_events import Recorder


class BucketSlice(NamedTuple):
    """The range [start, stop) of a bucket, in elements, and the tensor that holds it."""

    start: int
    stop: int
    flat: torch.Tensor


class Transport(Protocol):
    """The data ranks, as the buckets see them."""

    name: str
    size: int
    index: int
    grad_buffers: Sequence[torch.Tensor]
    """This rank's flat gradient of each bucket. Buckets with the same buffer index share memory."""
    buffer_indices: tuple[int, ...]
    shared_weights: Sequence[torch.Tensor] | None
    """The flat weights of each bucket, if they exist once per host; None if every rank has its own."""
    is_writer: bool
    """Whether this rank writes initial and loaded values into `shared_weights` for its host."""
    unshards_params: bool
    """Whether weights rest split among ranks that do not share memory, so that `unshard_async` gathers them."""
    replica_index: int
    """With hybrid sharding, every shard exists on several ranks: which of these replicas this rank belongs to."""

    @property
    def waiting_seconds(self) -> float:
        """Seconds spent moving gradients and waiting for other ranks, since the start."""
        ...

    @property
    def sent_bytes(self) -> float:
        """Bytes of gradients and weights sent over process groups since the start, by the ring formula."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Records waits, and this rank's part of each reduction."""
        ...

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None: ...

    @property
    def grad_scale_fn(self) -> Callable[[], float]:
        """The factor of every sum where states rest whole. Called after all ranks have begun to sum the loss."""
        ...

    @grad_scale_fn.setter
    def grad_scale_fn(self, factor: Callable[[], float]) -> None: ...

    def begin_call(self, call: str) -> None:
        """This rank begins a collective call. Does not wait: waiting for the LOSS scalars compares the calls."""
        ...

    def check_same_call(self) -> None:
        """Wait until all ranks have begun a call. Raises DivergenceError unless it is the same one."""
        ...

    def acquire_buffer(self, bucket: int) -> None:
        """Wait until this rank may write its buffer of `bucket`."""
        ...

    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        """This rank's buffer of `bucket` is complete: begin to reduce it. Does not wait.

        `reduction_index` identifies the reduction in the trace.
        """
        ...

    def wait_reduce(self, bucket: int) -> None:
        """Wait until the sum of a launched bucket is there, or until `reduce_range` can make it."""
        ...

    def is_reduced(self, bucket: int) -> bool:
        """Whether `wait_reduce` would return at once. May do this rank's part of reductions."""
        ...

    def can_acquire_buffer(self, bucket: int) -> bool:
        """Whether `acquire_buffer` and `reduce_async` would return at once. May do this rank's part of reductions."""
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

    def signal_backward_done(self) -> None:
        """This rank has ended backward, and reads the weights of this step no more. Does not wait."""
        ...

    def wait_weights_writable(self) -> None:
        """Wait until weights may be written: if they exist once per host, until all its ranks have ended backward."""
        ...

    def all_gather_weights_async(self, bucket: int, weight: torch.Tensor) -> None:
        """This rank has updated its shard of a bucket's weights: begin to send it to all ranks. In program order."""
        ...

    def wait_weights(self, bucket: int) -> None:
        """Wait until every rank's shard of a gathered bucket is new. `end_step` waits for all buckets."""
        ...

    def unshard_async(self, bucket: int, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Begin to gather a bucket's weights, of which this rank has `shard`, into `out`. Returns the wait.

        All ranks gather the same buckets in the same order, and wait for them in that order.
        """
        ...

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, in rank order. Waits."""
        ...

    def end_step(self) -> None:
        """This rank needs the sums of this step no more. The weights are whole when this returns."""
        ...

    def broadcast_weights(self) -> None:
        """Bring rank 0's `shared_weights` to every host. Collective."""
        ...

    def all_reduce_scalars_async(self, kind: int, values: torch.Tensor) -> None:
        """Begin to sum float64 scalars [n] over the ranks. Does not wait."""
        ...

    def wait_scalars(self, kind: int) -> list[float]:
        """The sums begun by `all_reduce_scalars_async`. LOSS: raises DivergenceError if calls differ."""
        ...


def unit_scale() -> float:
    """The factor of sums that are used as they are."""
    return 1.0


GradsOfBucket = Callable[[int], Sequence[torch.Tensor]]
