"""Local SGD: ranks train on their own gradients, and synchronise every few steps.

sync  a step in which ranks sum what they put into their buffers; all ranks sync after the same number of steps
Law: outside of a sync no rank reads or sends gradients or weights of others.
"""

from collections.abc import Sequence

from fourfold.comm.reduce.protocol import BucketSlice, GradReducer
from fourfold.comm.reduce.single_rank import SingleRankReducer


class LocalSGDReducer(SingleRankReducer):
    """See `GradReducer`: that of one rank, over the buffers of the reducer that joins all ranks."""

    def __init__(self, joined: GradReducer) -> None:
        super().__init__(joined.grad_buffers, joined.buffer_indices)
        self._joined, self.size = joined, joined.size
        self._is_syncing = False

    def all_reduce_async(self, bucket: int) -> None:
        """This rank's addend is in its buffer: begin to sum it over all ranks. Does not wait."""
        self._is_syncing = True
        self._joined.reduce_async(bucket, None, 1.0)

    def wait_all_reduce(self, bucket: int) -> Sequence[BucketSlice]:
        """Wait for a bucket's sum; returns where it lies until `end_step`."""
        self._joined.wait_reduce(bucket, 1.0)
        return self._joined.reduced_views(bucket)

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        # Other ranks may still read what this rank put there for the last sync.
        self._joined.acquire_buffer(bucket, 1.0)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return self._joined.can_acquire_buffer(bucket, 1.0)

    def end_step(self) -> None:
        super().end_step()
        if self._is_syncing:
            self._joined.end_step()
            self._is_syncing = False
