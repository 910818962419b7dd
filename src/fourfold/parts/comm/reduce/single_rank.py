"""A transport of one rank: a bucket's sum is its gradient, and everything rests whole.

Law: nothing waits and nothing is sent.
"""

from collections.abc import Callable, Sequence

import torch

from fourfold.parts.comm.reduce.protocol import BucketSlice, GradsOfBucket, unit_scale
from fourfold.words.trace_events import NULL_RECORDER


class SingleRankTransport:
    """See `Transport`.

    `unbucketed_grads(bucket)` gives a bucket's gradients where they have no buffers; the caller then keeps them.
    """

    name = "alone"
    size, index = 1, 0
    shared_weights: Sequence[torch.Tensor] | None = None
    is_writer, unshards_params, replica_index = True, False, 0

    def __init__(
        self,
        grad_buffers: Sequence[torch.Tensor],
        buffer_indices: tuple[int, ...] = (),
        *,
        unbucketed_grads: GradsOfBucket | None = None,
    ) -> None:
        self.grad_buffers: Sequence[torch.Tensor] = grad_buffers
        self.buffer_indices = buffer_indices or tuple(range(len(grad_buffers)))
        self._bucket_grads = unbucketed_grads or (lambda bucket: [self.grad_buffers[bucket]])
        self.waiting_seconds, self.sent_bytes = 0.0, 0.0
        self.recorder, self.grad_scale_fn = NULL_RECORDER, unit_scale
        self._is_scaled = [False] * len(self.buffer_indices)
        self._scalars: dict[int, torch.Tensor] = {}

    def begin_call(self, call: str) -> None:
        pass

    def check_same_call(self) -> None:
        pass

    def acquire_buffer(self, bucket: int) -> None:
        pass

    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        pass

    def wait_reduce(self, bucket: int) -> None:
        if not self._is_scaled[bucket]:
            self._is_scaled[bucket] = True
            if (factor := self.grad_scale_fn()) != 1.0:
                self._scale_bucket(bucket, factor)

    def _scale_bucket(self, bucket: int, factor: float) -> None:
        for flat in self._bucket_grads(bucket):
            flat.mul_(factor)

    def is_reduced(self, bucket: int) -> bool:
        return True

    def can_acquire_buffer(self, bucket: int) -> bool:
        return True

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        raise AssertionError("one rank's states rest whole")

    def reduce_shard(self, bucket: int) -> None:
        pass

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        return [self.grad_shard(bucket)]

    def grad_shard(self, bucket: int) -> BucketSlice:
        flat = self.grad_buffers[bucket]
        return BucketSlice(0, flat.numel(), flat)

    def scale_grads(self, factor: float) -> None:
        for bucket in range(len(self.buffer_indices)):
            self._scale_bucket(bucket, factor)

    def all_gather_grads(self, bucket: int) -> None:
        pass

    def signal_backward_done(self) -> None:
        pass

    def wait_weights_writable(self) -> None:
        pass

    def all_gather_weights_async(self, bucket: int, weight: torch.Tensor) -> None:
        pass

    def unshard_async(self, bucket: int, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        raise AssertionError("one rank's weights rest whole")

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]

    def wait_weights(self, bucket: int) -> None:
        pass

    def end_step(self) -> None:
        self._is_scaled = [False] * len(self.buffer_indices)

    def broadcast_weights(self) -> None:
        pass

    def all_reduce_scalars_async(self, kind: int, values: torch.Tensor) -> None:
        self._scalars[kind] = values

    def wait_scalars(self, kind: int) -> list[float]:
        return self._scalars.pop(kind).tolist()
