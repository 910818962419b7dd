"""One rank alone: a bucket's sum is its gradient, its weights are whole, its scalars are their sums.

flat  where one tensor holds a bucket's whole sum: `WholeFlats` is what reducers of such sums have in common
Law: nothing waits and nothing is sent.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from fourfold.comm.reduce.protocol import (
    NUM_LOSS_SCALARS,
    BucketSlice,
    DataTransport,
    GradsOfBucket,
    WorldChannel,
    check_room,
)

DESCRIPTION = "one rank, nothing to exchange"


class WholeFlats:
    """A part of `GradReducer`, for sums that rest whole, each in one flat that is this rank's own."""

    replica_index = 0

    def __init__(self, grad_buffers: Sequence[Tensor], buffer_indices: tuple[int, ...]) -> None:
        self.grad_buffers, self.buffer_indices = grad_buffers, buffer_indices

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        raise AssertionError("these sums rest whole: they are scaled when they are made")

    def reduce_shard(self, bucket: int) -> None:
        pass

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        flat = self.grad_buffers[bucket]
        return [BucketSlice(0, flat.numel(), flat)]

    def scale_grads(self, factor: float) -> None:
        for flat in self.grad_buffers:
            flat.mul_(factor)

    def all_gather_grads(self, bucket: int) -> None:
        pass


class SingleRankReducer(WholeFlats):
    """See `GradReducer`.

    `unbucketed_grads(bucket)` gives a bucket's gradients where they have no buffers; the caller then keeps them.
    """

    size: int = 1

    def __init__(
        self,
        grad_buffers: Sequence[Tensor],
        buffer_indices: tuple[int, ...] = (),
        *,
        unbucketed_grads: GradsOfBucket | None = None,
    ) -> None:
        super().__init__(grad_buffers, buffer_indices or tuple(range(len(grad_buffers))))
        self._bucket_grads = unbucketed_grads or (lambda bucket: [self.grad_buffers[bucket]])
        self._is_scaled = [False] * len(self.buffer_indices)

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        pass

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return True

    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        pass

    def wait_reduce(self, bucket: int, factor: float) -> None:
        if not self._is_scaled[bucket]:
            self._is_scaled[bucket] = True
            if factor != 1.0:
                self._scale_bucket(bucket, factor)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        return factor is not None or self._is_scaled[bucket]

    def grad_shard(self, bucket: int) -> BucketSlice:
        flat = self.grad_buffers[bucket]
        return BucketSlice(0, flat.numel(), flat)

    def scale_grads(self, factor: float) -> None:
        for bucket in range(len(self.buffer_indices)):
            self._scale_bucket(bucket, factor)

    def _scale_bucket(self, bucket: int, factor: float) -> None:
        for flat in self._bucket_grads(bucket):
            flat.mul_(factor)

    def end_step(self) -> None:
        self._is_scaled = [False] * len(self.buffer_indices)


class WholeWeights:
    """See `WeightGatherer`: every one of `size` ranks has all weights to itself, and updates all of them."""

    shared_weights: Sequence[Tensor] | None = None
    is_writer, unshards_params = True, False

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def signal_backward_done(self) -> None:
        pass

    def wait_writable(self) -> None:
        pass

    def can_gather(self) -> bool:
        return True

    def all_gather_async(self, bucket: int, weight: Tensor) -> None:
        raise AssertionError("every rank updates the whole weights")

    def wait(self, bucket: int) -> None:
        pass

    def unshard_async(self, bucket: int, shard: Tensor, out: Tensor, unshard_index: int | None) -> Callable[[], None]:
        raise AssertionError("these weights rest whole")

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        raise AssertionError("these weights rest whole: no rank misses a bucket")

    def broadcast(self) -> None:
        raise AssertionError("every rank has weights of its own")

    def end_step(self) -> None:
        pass


class LocalScalars:
    """See `ScalarReducer`: of one rank alone. Without capacity: of a transport that is asked for no scalars."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._begun: dict[int, Tensor] = {}

    def all_reduce_async(self, kind: int, values: Tensor) -> None:
        check_room(values, self._capacity)
        self._begun[kind] = values

    def is_ready(self, kind: int) -> bool:
        return kind in self._begun

    def wait(self, kind: int) -> list[float]:
        return self._begun.pop(kind).tolist()


class SingleRankCalls:
    """See `CallChecker`: one rank is always in the same call as itself."""

    def begin(self, call: str) -> None:
        pass

    def check_same(self) -> None:
        pass

    def check_begun(self, waited_seconds: float | None) -> None:
        pass


def single_rank_world() -> WorldChannel:
    """The channel of a world of one rank."""
    return WorldChannel(LocalScalars(NUM_LOSS_SCALARS), SingleRankCalls())


def single_rank_transport(
    reducer: SingleRankReducer, num_scalars: int, description: str = DESCRIPTION
) -> DataTransport:
    """The transport of a rank that trains its own weights; where it is one of several, they have local steps."""
    return DataTransport(reducer, WholeWeights(reducer.size), LocalScalars(num_scalars), description)
