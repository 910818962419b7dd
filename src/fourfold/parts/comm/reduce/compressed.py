"""Coded: a transport whose gradients travel as the messages of codecs.

talk   of a bucket: begins when the bucket is launched, goes on when its messages are there or its sum is needed
wire   the ranks that gather each other's messages: one of each host, or all where there is no shared memory
sums   for each round whose messages are summed, a transport of its own: its buckets are the messages
inner  the transport underneath: it adds up what one host's ranks have, and moves weights and scalars
Law: a codec's worker is one data rank, whatever joins the ranks. So a plan trains with the same mathematics on one
host, where nothing needs to be small, as on many.

A message that is summed becomes the whole sum on every rank; then one rank of a host hands it to the inner transport,
and the others hand it zeros. Gathered messages are read by the ranks of one wire only, and the hosts' ranks are added
up by the inner transport, in full precision, in memory.
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

DONE_ROUND = math.inf


class CompressedRoutes(NamedTuple):
    """How messages travel: the inner transport, one for each round of sums, and the wire.

    `tells`: whether this rank is the one of its host that hands the sums of messages to the inner transport.
    """

    inner: Transport
    round_transports: Sequence[Transport]
    gatherer: MessageGatherer
    is_host_leader: bool


@dataclass
class _PendingReduction:
    """A bucket's talk, what its reduction is called, and the message that is on its way, of which round."""

    bucket: int
    reduction_index: int
    generator: CodecReduction
    message_result: AsyncResult
    round_index: float = 0


class CompressedTransport:
    """See `Transport`; `codecs` has one for each bucket."""

    def __init__(self, routes: CompressedRoutes, codecs: Sequence[Codec]) -> None:
        self._inner, self._round_transports, self._gatherer, self._is_host_leader = routes
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
            self._inner.sent_bytes + self._gatherer.sent_bytes + sum(each.sent_bytes for each in self._round_transports)
        )

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin, waited = time.perf_counter(), self._inner.waiting_seconds
        yield
        self._codec_seconds += time.perf_counter() - begin - (self._inner.waiting_seconds - waited)

    def rescale_residuals(self, factor: float) -> None:
        """Gradients are from now on measured in another unit: multiply what is remembered."""
        for codec in self.codecs:
            codec.scale_residual(factor)

    # ---- talks --------------------------------------------------------------------------------------

    def acquire_buffer(self, bucket: int) -> None:
        same = [
            each.bucket for each in self._pending if self.buffer_indices[each.bucket] == self.buffer_indices[bucket]
        ]
        if same:
            with self._timed():
                self._finish_through(same[-1])
        self._inner.acquire_buffer(bucket)

    @torch.no_grad()
    def reduce_async(self, bucket: int, reduction_index: int) -> None:
        with self._timed():
            self._begin_grad_round(reduction_index // len(self.codecs))
            talk = self.codecs[bucket].reduce(self._unpadded_grads(bucket))
            message = next(talk)
            self._pending.append(
                _PendingReduction(bucket, reduction_index, talk, self._send_message(bucket, 0, message))
            )
            self._advance_ready()

    def _unpadded_grads(self, bucket: int) -> Tensor:
        """A slot without its padding."""
        return self.grad_buffers[bucket][: self.codecs[bucket].num_elements]

    def _begin_grad_round(self, number: int) -> None:
        """Begin a further round of reductions in the same step: messages are written again, when all have read them."""
        if number != self._grad_round:
            if self._pending:
                self._finish_through(self._pending[-1].bucket)
            if self._round_transports:
                # Room for the next message comes only when every rank has begun this round. A rank that has not may be
                # waiting for this rank's part of the last sum.
                self._finish_handed_over()
            for each in self._round_transports:
                each.end_step()
        self._grad_round = number

    def _send_message(self, bucket: int, number: int, message: Message) -> AsyncResult:
        """Send a message of a round on its way."""
        if message.combine is Combine.GATHER:
            return self._gatherer.all_gather_async(message.payload)
        transport, place = self._round_transports[number], self._message_index[number][bucket]
        transport.acquire_buffer(place)
        transport.grad_buffers[place].copy_(message.payload)
        transport.reduce_async(place, place)
        return AsyncResult(
            functools.partial(_wait_total, transport, place), functools.partial(transport.is_reduced, place)
        )

    def _advance_ready(self) -> None:
        """Go on with the talks whose messages are there, without waiting.

        Messages of a round are said in program order: a talk must not overtake those before it.
        """
        reached = DONE_ROUND
        for talking in list(self._pending):
            while talking.round_index < reached and talking.message_result.is_done():
                self._advance(talking)
            reached = talking.round_index
            if reached == 0:
                break
        self._reduce_finished()

    def _finish_through(self, bucket: int) -> None:
        """Wait for the ends of the talks up to a bucket's.

        No further: a rank that has not launched the next bucket may be waiting for the sum of this one.
        """
        with self.recorder.waiting():
            while any(each.bucket == bucket for each in self._pending):
                # Before any wait for a later message: who is to send it may be waiting for this rank's part.
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
            message = reduction.generator.send(reduction.message_result.wait())
        except StopIteration:
            reduction.round_index = DONE_ROUND
            return
        reduction.round_index += 1
        reduction.message_result = self._send_message(reduction.bucket, int(reduction.round_index), message)

    def _reduce_finished(self) -> None:
        """Give the inner transport the buckets whose talks have ended, in program order."""
        while self._pending and self._pending[0].round_index == DONE_ROUND:
            talking = self._pending.popleft()
            if not self._is_host_leader and self.codecs[talking.bucket].rounds[0].combine is Combine.SUM:
                self._unpadded_grads(talking.bucket).zero_()
            self._inner.reduce_async(talking.bucket, talking.reduction_index)
            self._last_handed_over = talking.bucket

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
        for each in self._round_transports:
            each.end_step()
        self._grad_round, self._last_handed_over = 0, None
        self._inner.end_step()

    def begin_call(self, call: str) -> None:
        self._inner.begin_call(call)

    def check_same_call(self) -> None:
        self._inner.check_same_call()

    # ---- as the inner transport has it ----------------------------------------------------------------

    def can_acquire_buffer(self, bucket: int) -> bool:
        same = any(self.buffer_indices[each.bucket] == self.buffer_indices[bucket] for each in self._pending)
        return not same and self._inner.can_acquire_buffer(bucket)

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
    """By round of sums: the place of each bucket that has one among that round's messages."""
    num_rounds = max(len(codec.rounds) for codec in codecs)
    result = []
    for number in range(num_rounds):
        those = [
            bucket
            for bucket, codec in enumerate(codecs)
            if number < len(codec.rounds) and codec.rounds[number].combine is Combine.SUM
        ]
        result.append({bucket: place for place, bucket in enumerate(those)})
    return [each for each in result if each]


def _wait_total(transport: Transport, place: int) -> Sequence[Tensor]:
    transport.wait_reduce(place)
    transport.all_gather_grads(place)
    return [transport.grad_buffers[place]]
