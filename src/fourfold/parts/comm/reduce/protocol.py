"""Transport: what a layout change of a bucket costs between these ranks, and how it is done.

slot      this rank's flat of a bucket's gradient; where gradients rest split, several buckets take turns in one
launch    say that the slot is complete; reductions are launched in program order, on every rank the same
sum       the sum over ranks of all slots of a bucket; it rests where `sums` says
share     what a rank updates where optimizer states rest split: an equal stretch of every bucket
measure   a few float64 scalars summed over ranks
call      what the ranks do together, and in which step; see `calls`
Law: every rank launches and measures the same things in the same order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from fourfold.words.trace_events import Recorder


class BucketSlice(NamedTuple):
    """A stretch [start, stop) of a bucket, in elements, and the tensor that holds it."""

    start: int
    stop: int
    flat: torch.Tensor


class Transport(Protocol):
    """The data ranks, as the buckets see them."""

    name: str
    size: int
    index: int
    grad_buffers: Sequence[torch.Tensor]
    """This rank's gradient flats, one a bucket. Buckets with the same number in `turns` share their memory."""
    buffer_indices: tuple[int, ...]
    shared_weights: Sequence[torch.Tensor] | None
    """The flats of the weights, where they exist once per host; None where each rank is to have its own."""
    is_writer: bool
    """Whether this rank is the one that writes into `weights` what all are to have."""
    unshards_params: bool
    """Whether weights rest split among ranks that do not share memory: `bring` gathers them before use."""
    replica_index: int
    """Where shares exist several times (hybrid sharding): which of them is this rank's."""

    @property
    def waiting_seconds(self) -> float:
        """Time spent moving gradients and waiting for others, since the start."""
        ...

    @property
    def sent_bytes(self) -> float:
        """Bytes of gradients and weights that this rank has sent over process groups, since the start, as by ring."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Told of waits and of this rank's part of each reduction."""
        ...

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None: ...

    @property
    def grad_scale_fn(self) -> Callable[[], float]:
        """What sums are multiplied by where states rest whole; asked once all ranks have measured the loss."""
        ...

    @grad_scale_fn.setter
    def grad_scale_fn(self, factor: Callable[[], float]) -> None: ...

    def begin_call(self, call: str) -> None:
        """This rank begins a collective call. Does not wait; who reads the sums of LOSS knows that all began it."""
        ...

    def check_same_call(self) -> None:
        """Wait until all ranks have begun a call. Raises DivergenceError unless it is the same one."""
        ...

    def acquire_buffer(self, bucket: int) -> None:
        """Wait until this rank's slot of `bucket` may be written."""
        ...

    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        """This rank's slot of `bucket` is complete; the reduction is called `name`. Does not wait for its end."""
        ...

    def wait_reduce(self, bucket: int) -> None:
        """Wait until the sum of a launched bucket is there, or can be made by `take`."""
        ...

    def is_reduced(self, bucket: int) -> bool:
        """Whether `complete` would not wait. May do this rank's part of reductions."""
        ...

    def can_acquire_buffer(self, bucket: int) -> bool:
        """Whether `lend` and `launch` would not wait. May do this rank's part of reductions."""
        ...

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        """Have the sum of [start, stop), inside this rank's share of a completed bucket, multiplied by `factor`."""
        ...

    def reduce_shard(self, bucket: int) -> None:
        """Have the whole sum of this rank's share of a completed bucket, now."""
        ...

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        """Where a bucket's sum rests: always the same tensors. Only this rank's share where states rest split."""
        ...

    def grad_shard(self, bucket: int) -> BucketSlice:
        """The part of a bucket's sum that this rank measures and scales, so that all ranks cover it once."""
        ...

    def scale_grads(self, factor: float) -> None:
        """Multiply every completed sum by a factor that all ranks agree on, where states rest whole."""
        ...

    def all_gather_grads(self, bucket: int) -> None:
        """Put the whole sum into this rank's slot, where states rest whole."""
        ...

    def signal_backward_done(self) -> None:
        """This rank's backward is over: it reads the weights of this step no more. Does not wait."""
        ...

    def wait_weights_writable(self) -> None:
        """Wait until weights may be written: where they exist once per host, until all its ranks have permitted it."""
        ...

    def all_gather_weights_async(self, bucket: int, weight: torch.Tensor) -> None:
        """This rank's share of a bucket's weights is new. Begins to bring it to all; in program order."""
        ...

    def wait_weights(self, bucket: int) -> None:
        """Wait until all shares of a bucket that this rank has published are new. `close` waits for all buckets."""
        ...

    def unshard_async(self, bucket: int, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Begin to gather a bucket of weights, of which this rank has `share`, into `out`. The returned function waits.

        All ranks gather the same buckets in the same order, and wait for them in that order.
        """
        ...

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in rank order. Waits until all have given one."""
        ...

    def end_step(self) -> None:
        """This rank has finished with the sums of this step. The weights are whole when this returns."""
        ...

    def broadcast_weights(self) -> None:
        """Bring rank 0's `weights` to every host. Collective."""
        ...

    def all_reduce_scalars_async(self, kind: int, values: torch.Tensor) -> None:
        """Begin summing float64 scalars [n] over the ranks. Does not wait."""
        ...

    def wait_scalars(self, kind: int) -> list[float]:
        """The sums begun by `measure`. Those of LOSS raise DivergenceError where ranks are in different calls."""
        ...


def unit_scale() -> float:
    """The factor of sums that are used as they are."""
    return 1.0


GradsOfBucket = Callable[[int], Sequence[torch.Tensor]]
