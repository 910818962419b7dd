"""Compressed transport: gradients travel between ranks as the messages of codecs.

codec run  the generator by which a codec reduces one bucket: it yields a message, and is sent what became of it
stage      the place of a message in a codec run: first, second, …; later messages depend on the results of earlier ones
round      one reduction of every bucket; a step with several microbatches may have several
inner      the transport underneath: adds up what one host's ranks hold, and moves weights and scalars
gatherer   all-gathers messages: among one rank of each host, or among all ranks without shared memory
Law: a codec's worker is one data rank, whatever joins the ranks. So a plan trains with the same mathematics on one
host, where nothing needs to be small, as on many.

Messages that are summed go through one more transport per stage, whose buckets are the messages. Every rank then has
the whole sum; one rank of each host hands it to the inner transport, and the others hand over zeros. Gathered messages
reach only one gatherer's ranks; the inner transport adds up the ranks of a host, in full precision, in memory.
"""

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts.codec.protocol import Codec, CodecReduction, Message
from fourfold.parts.comm.reduce.async_result import AsyncResult
from fourfold.parts.comm.reduce.message_gatherer import MessageGatherer
from fourfold.parts.comm.reduce.protocol import BucketSlice, Transport
from fourfold.plan.codec import Combine
from fourfold.words.trace_events import Recorder


class CompressedRoutes(NamedTuple):
    """How messages travel.

    stage_transports  one for each stage whose messages are summed
    is_host_leader    whether this rank hands sums of messages to the inner transport, for its host
    """

    inner: Transport
    stage_transports: Sequence[Transport]
    gatherer: MessageGatherer
    is_host_leader: bool


@dataclass
class _PendingReduction:
    """A bucket whose codec run has not ended, and the message that it waits for."""

    bucket: int
    reduction_index: int
    run: CodecReduction
    message_result: AsyncResult
    stage: int = 0
    is_done: bool = False


class CompressedTransport:
    """See `Transport`. `codecs`: one for each bucket."""

    def __init__(self, routes: CompressedRoutes, codecs: Sequence[Codec]) -> None:
        self._inner, self._stage_transports, self._gatherer, self._is_host_leader = routes
        self.codecs = codecs
        self.name, self.size, self.index = self._inner.name, self._inner.size, self._inner.index
        self.grad_buffers, self.buffer_indices = self._inner.grad_buffers, self._inner.buffer_indices
        self.shared_weights, self.is_writer = self._inner.shared_weights, self._inner.is_writer
        self.unshards_params, self.replica_index = self._inner.unshards_params, self._inner.replica_index
        self._message_index = message_indices(codecs)
        self._pending: deque[_PendingReduction] = deque()
        self._last_handed_over: int | None = None
        self._grad_round, self._codec_seconds = 0, 0.0

    @property
    def recorder(self) -> Recorder:
        return self._inner.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._inner.recorder = recorder

    @property
    def grad_scale_fn(self) -> Callable[[], float]:
        return self._inner.grad_scale_fn

    @grad_scale_fn.setter
    def grad_scale_fn(self, factor: Callable[[], float]) -> None:
        self._inner.grad_scale_fn = factor

    @property
    def waiting_seconds(self) -> float:
        return self._inner.waiting_seconds + self._codec_seconds

    @property
    def sent_bytes(self) -> float:
        return (
            self._inner.sent_bytes + self._gatherer.sent_bytes + sum(each.sent_bytes for each in self._stage_transports)
        )

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin, waited = time.perf_counter(), self._inner.waiting_seconds
        yield
        self._codec_seconds += time.perf_counter() - begin - (self._inner.waiting_seconds - waited)

    def rescale_residuals(self, factor: float) -> None:
        """Multiply what the codecs remember: from now on gradients are `factor` times as large."""
        for codec in self.codecs:
            codec.scale_residual(factor)

    # ---- codec runs ---------------------------------------------------------------------------------

    def acquire_buffer(self, bucket: int) -> None:
        pending = [
            each.bucket for each in self._pending if self.buffer_indices[each.bucket] == self.buffer_indices[bucket]
        ]
        if pending:
            with self._timed():
                self._finish_through(pending[-1])
        self._inner.acquire_buffer(bucket)

    @torch.no_grad()
    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        with self._timed():
            self._begin_grad_round(reduction_index // len(self.codecs))
            run = self.codecs[bucket].reduce(self._unpadded_grads(bucket))
            result = self._send_message(bucket, 0, next(run))
            self._pending.append(_PendingReduction(bucket, reduction_index, run, result))
            self._advance_ready()

    def _unpadded_grads(self, bucket: int) -> Tensor:
        """A bucket's buffer without its padding."""
        return self.grad_buffers[bucket][: self.codecs[bucket].num_elements]

    def _begin_grad_round(self, number: int) -> None:
        """Begin round `number` of reductions within a step: message buffers are free once every rank has begun it."""
        if number != self._grad_round:
            if self._pending:
                self._finish_through(self._pending[-1].bucket)
            if self._stage_transports:
                # Room for the next message comes only when every rank has begun this round. A rank that has not may be
                # waiting for this rank's part of the last sum.
                self._finish_handed_over()
            for each in self._stage_transports:
                each.end_step()
        self._grad_round = number

    def _send_message(self, bucket: int, stage: int, message: Message) -> AsyncResult:
        if message.combine is Combine.GATHER:
            return self._gatherer.all_gather_async(message.payload)
        transport, index = self._stage_transports[stage], self._message_index[stage][bucket]
        transport.acquire_buffer(index)
        transport.grad_buffers[index].copy_(message.payload)
        transport.reduce_async(index, index)
        return AsyncResult(
            functools.partial(_wait_total, transport, index), functools.partial(transport.is_reduced, index)
        )

    def _advance_ready(self) -> None:
        """Continue the codec runs whose messages have come, without waiting.

        The messages of a stage are sent in program order, so no run may overtake an earlier one: messages arrive in
        another order on every rank, and collectives of one group pair up by order alone.
        """
        limit = math.inf
        for reduction in list(self._pending):
            while not reduction.is_done and reduction.stage < limit and reduction.message_result.is_done():
                self._advance(reduction)
            if not reduction.is_done:
                limit = reduction.stage
        self._reduce_finished()

    def _finish_through(self, bucket: int) -> None:
        """Wait until the codec runs up to a bucket's have ended.

        Not further: a rank that has not launched the next bucket may be waiting for this bucket's sum.
        """
        with self.recorder.waiting():
            while any(each.bucket == bucket for each in self._pending):
                # Before any wait for a later message: its sender may be waiting for this rank's part.
                self._finish_handed_over()
                self._advance(self._pending[0])
                self._advance_ready()

    def _finish_handed_over(self) -> None:
        """Do this rank's part of the sums that it has handed to the inner transport."""
        if self._last_handed_over is not None:
            self._inner.wait_reduce(self._last_handed_over)
            self._last_handed_over = None

    @torch.no_grad()
    def _advance(self, reduction: _PendingReduction) -> None:
        try:
            message = reduction.run.send(reduction.message_result.wait())
        except StopIteration:
            reduction.is_done = True
            return
        reduction.stage += 1
        reduction.message_result = self._send_message(reduction.bucket, reduction.stage, message)

    def _reduce_finished(self) -> None:
        """Hand the buckets whose codec runs have ended to the inner transport, in program order."""
        while self._pending and self._pending[0].is_done:
            reduction = self._pending.popleft()
            if not self._is_host_leader and self.codecs[reduction.bucket].rounds[0].combine is Combine.SUM:
                self._unpadded_grads(reduction.bucket).zero_()
            self._inner.reduce_async(reduction.bucket, reduction.reduction_index)
            self._last_handed_over = reduction.bucket

    def wait_reduce(self, bucket: int) -> None:
        if any(each.bucket == bucket for each in self._pending):
            with self._timed():
                self._finish_through(bucket)
        self._inner.wait_reduce(bucket)

    def is_reduced(self, bucket: int) -> bool:
        if self._pending:
            with self._timed():
                self._advance_ready()
        return all(each.bucket != bucket for each in self._pending) and self._inner.is_reduced(bucket)

    def end_step(self) -> None:
        for each in self._stage_transports:
            each.end_step()
        self._grad_round, self._last_handed_over = 0, None
        self._inner.end_step()

    def begin_call(self, call: str) -> None:
        self._inner.begin_call(call)

    def check_same_call(self) -> None:
        self._inner.check_same_call()

    # ---- the inner transport's ----------------------------------------------------------------------

    def can_acquire_buffer(self, bucket: int) -> bool:
        is_pending = any(self.buffer_indices[each.bucket] == self.buffer_indices[bucket] for each in self._pending)
        return not is_pending and self._inner.can_acquire_buffer(bucket)

    def unshard_async(self, bucket: int, shard: Tensor, out: Tensor) -> Callable[[], None]:
        return self._inner.unshard_async(bucket, shard, out)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._inner.all_gather_ints(row)

    def reduce_range(self, bucket: int, start: int, stop: int, factor: float) -> None:
        self._inner.reduce_range(bucket, start, stop, factor)

    def reduce_shard(self, bucket: int) -> None:
        self._inner.reduce_shard(bucket)

    def reduced_views(self, bucket: int) -> Sequence[BucketSlice]:
        return self._inner.reduced_views(bucket)

    def grad_shard(self, bucket: int) -> BucketSlice:
        return self._inner.grad_shard(bucket)

    def scale_grads(self, factor: float) -> None:
        self._inner.scale_grads(factor)

    def all_gather_grads(self, bucket: int) -> None:
        self._inner.all_gather_grads(bucket)

    def signal_backward_done(self) -> None:
        self._inner.signal_backward_done()

    def wait_weights_writable(self) -> None:
        self._inner.wait_weights_writable()

    def all_gather_weights_async(self, bucket: int, weight: Tensor) -> None:
        self._inner.all_gather_weights_async(bucket, weight)

    def wait_weights(self, bucket: int) -> None:
        self._inner.wait_weights(bucket)

    def broadcast_weights(self) -> None:
        self._inner.broadcast_weights()

    def all_reduce_scalars_async(self, kind: int, values: Tensor) -> None:
        self._inner.all_reduce_scalars_async(kind, values)

    def wait_scalars(self, kind: int) -> list[float]:
        return self._inner.wait_scalars(kind)


def message_indices(codecs: Sequence[Codec]) -> list[dict[int, int]]:
    """For each stage with summed messages: each bucket's index among the messages of that stage."""
    num_stages = max(len(codec.rounds) for codec in codecs)
    result = []
    for stage in range(num_stages):
        buckets = [
            bucket
            for bucket, codec in enumerate(codecs)
            if stage < len(codec.rounds) and codec.rounds[stage].combine is Combine.SUM
        ]
        result.append({bucket: index for index, bucket in enumerate(buckets)})
    return [each for each in result if each]


def _wait_total(transport: Transport, index: int) -> Sequence[Tensor]:
    transport.wait_reduce(index)
    transport.all_gather_grads(index)
    return [transport.grad_buffers[index]]
