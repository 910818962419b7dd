"""Local SGD transport: ranks train on their own gradients, and synchronise every few steps.

sync  a step in which ranks sum what they put into their buffers; all ranks sync after the same number of steps
Law: outside of a sync no rank reads or sends more than scalars.
"""

from collections.abc import Callable, Sequence

import torch

from fourfold.parts.comm.reduce.protocol import BucketSlice, Transport
from fourfold.parts.comm.reduce.single_rank import SingleRankTransport
from fourfold.words.program import GRAD_NORM, LOSS
from fourfold.words.trace_events import Recorder, WaitsOnlyRecorder

GLOBAL_SCALARS = (LOSS, GRAD_NORM)  # the scalars that are summed over all ranks, in every step


class LocalSGDTransport:
    """See `Transport`: that of one rank, over the buffers of the transport that joins all ranks."""

    shared_weights: Sequence[torch.Tensor] | None = None
    is_writer, unshards_params, replica_index = True, False, 0

    def __init__(self, global_transport: Transport, num_ranks: int) -> None:
        self._global_transport = global_transport
        self._local_transport = SingleRankTransport(global_transport.grad_buffers, global_transport.buffer_indices)
        # Over all hosts; the size of a shared memory transport counts only its own host's ranks.
        self.name, self.size, self.index = global_transport.name, num_ranks, global_transport.index
        self.grad_buffers, self.buffer_indices = global_transport.grad_buffers, global_transport.buffer_indices
        self._is_syncing = False

    @property
    def recorder(self) -> Recorder:
        return self._global_transport.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        # The sums of a sync are no reductions of gradients: the trace shows them within its pull actions.
        self._global_transport.recorder = WaitsOnlyRecorder(recorder)

    @property
    def grad_scale_fn(self) -> Callable[[], float]:
        return self._local_transport.grad_scale_fn

    @grad_scale_fn.setter
    def grad_scale_fn(self, factor: Callable[[], float]) -> None:
        self._local_transport.grad_scale_fn = factor

    @property
    def waiting_seconds(self) -> float:
        return self._global_transport.waiting_seconds

    @property
    def sent_bytes(self) -> float:
        return self._global_transport.sent_bytes

    # ---- a sync -------------------------------------------------------------------------------------

    def all_reduce_async(self, bucket: int) -> None:
        """This rank's addend is in its buffer: begin to sum it over all ranks. Does not wait."""
        self._is_syncing = True
        self._global_transport.reduce_async(bucket, bucket)

    def wait_all_reduce(self, bucket: int) -> Sequence[BucketSlice]:
        """Wait for a bucket's sum; returns where it lies until `end_step`."""
        self._global_transport.wait_reduce(bucket)
        return self._global_transport.reduced_views(bucket)

    def end_step(self) -> None:
        self._local_transport.end_step()
        if self._is_syncing:
            self._global_transport.end_step()
            self._is_syncing = False

    # ---- all ranks together, in every step ----------------------------------------------------------

    def begin_call(self, call: str) -> None:
        self._global_transport.begin_call(call)

    def check_same_call(self) -> None:
        self._global_transport.check_same_call()

    def acquire_buffer(self, bucket: int) -> None:
        # Other ranks may still read what this rank put there for the last sync.
        self._global_transport.acquire_buffer(bucket)

    def broadcast_weights(self) -> None:
        self._global_transport.broadcast_weights()

    def all_reduce_scalars_async(self, kind: int, values: torch.Tensor) -> None:
        self._transport_of(kind).all_reduce_scalars_async(kind, values)

    def wait_scalars(self, kind: int) -> list[float]:
        return self._transport_of(kind).wait_scalars(kind)

    def _transport_of(self, kind: int) -> Transport:
        return self._global_transport if kind in GLOBAL_SCALARS else self._local_transport

    # ---- this rank alone ----------------------------------------------------------------------------

    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        self._local_transport.reduce_async(bucket, reduction_index)

    def wait_reduce(self, bucket: int) -> None:
        self._local_transport.wait_reduce(bucket)

    def is_reduced(self, bucket: int) -> bool:
        return self._local_transport.is_reduced(bucket)

    def can_acquire_buffer(self, bucket: int) -> bool:
        return self._local_transport.can_acquire_buffer(bucket)

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        self._local_transport.reduce_range(bucket, start, stop, factor)

    def reduce_shard(self, bucket: int) -> None:
        self._local_transport.reduce_shard(bucket)

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        return self._local_transport.reduced_views(bucket)

    def grad_shard(self, bucket: int) -> BucketSlice:
        return self._local_transport.grad_shard(bucket)

    def scale_grads(self, factor: float) -> None:
        self._local_transport.scale_grads(factor)

    def all_gather_grads(self, bucket: int) -> None:
        self._local_transport.all_gather_grads(bucket)

    def signal_backward_done(self) -> None:
        self._local_transport.signal_backward_done()

    def wait_weights_writable(self) -> None:
        self._local_transport.wait_weights_writable()

    def all_gather_weights_async(self, bucket: int, weight: torch.Tensor) -> None:
        self._local_transport.all_gather_weights_async(bucket, weight)

    def unshard_async(self, bucket: int, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        return self._local_transport.unshard_async(bucket, shard, out)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._local_transport.all_gather_ints(row)

    def wait_weights(self, bucket: int) -> None:
        self._local_transport.wait_weights(bucket)
