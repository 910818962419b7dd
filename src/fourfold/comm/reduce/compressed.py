"""Compressed reductions: gradients travel between ranks as the messages of codecs.

codec run  the generator by which a codec reduces one bucket: it yields a message, and is sent what became of it
stage      the place of a message in a codec run: first, second, …; later messages depend on the results of earlier ones
round      one reduction of every bucket; a step with several microbatches may have several
inner      the reducer underneath: adds up what one host's ranks hold
gatherer   all-gathers messages: among one rank of each host, or among all ranks without shared memory
Law: a codec's worker is one data rank, whatever joins the ranks. So a plan trains with the same mathematics on one
host, where nothing needs to be small, as on many.

Messages that are summed go through one more reducer per stage, whose buckets are the messages. Every rank then has
the whole sum; one rank of each host hands it to the inner reducer, and the others hand over zeros. Gathered messages
reach only one gatherer's ranks; the inner reducer adds up the ranks of a host, in full precision, in memory.
"""

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.comm.codec.protocol import Codec, CodecReduction, Message
from fourfold.comm.collectives import Group, Work, ring_bytes
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import BucketSlice, GradReducer
from fourfold.plan.codec import Combine
from fourfold.words.layout import Change

# ---- gatherers -----------------------------------------------------------------------------------------------------


class MessageGatherer:
    """All-gathers the messages of a group: of one rank of each host if hosts share memory, else of all.

    Without a group the result is this rank's own message: ranks then sum what they have decoded in shared memory.
    """

    def __init__(self, meter: CommMeter, group: Group | None = None, size: int = 1) -> None:
        self._meter, self._group, self._size = meter, group, size

    def all_gather_async(self, payload: Tensor) -> Work:
        """Begin to gather the members' messages [elements]; the result is one message per member, in rank order."""
        if self._group is None:
            return Work(lambda: [payload])
        gathered = payload.new_empty(self._size * payload.numel())
        self._meter.sent_bytes += ring_bytes(Change.ALL_GATHER, gathered, self._size)
        work = self._group.all_gather(gathered, payload)
        return work._replace(wait=lambda: work.wait().view(self._size, -1).unbind())


# ---- compressed reductions -----------------------------------------------------------------------------------------


class CompressedRoutes(NamedTuple):
    """How messages travel.

    stage_reducers  one for each stage whose messages are summed
    is_host_leader  whether this rank hands sums of messages to the inner reducer, for its host
    needs_factor    whether the inner reducer's sums need the factor: where states rest whole
    """

    inner: GradReducer
    stage_reducers: Sequence[GradReducer]
    gatherer: MessageGatherer
    is_host_leader: bool
    needs_factor: bool


@dataclass
class _PendingReduction:
    """A bucket whose codec run has not ended, and the message that it waits for."""

    bucket: int
    reduction_index: int | None
    run: CodecReduction
    message_result: Work
    stage: int = 0
    is_done: bool = False


class CompressedReducer:
    """See `GradReducer`. `codecs`: one for each bucket."""

    def __init__(self, routes: CompressedRoutes, codecs: Sequence[Codec], meter: CommMeter) -> None:
        self._routes, self._inner, self._meter = routes, routes.inner, meter
        self.codecs = codecs
        self.size, self.replica_index = routes.inner.size, routes.inner.replica_index
        self.grad_buffers, self.buffer_indices = routes.inner.grad_buffers, routes.inner.buffer_indices
        self._message_index = message_indices(codecs)
        self._pending: deque[_PendingReduction] = deque()
        self._last_handed_over: int | None = None
        self._grad_round = 0

    # ---- codec runs ---------------------------------------------------------------------------------

    def acquire_buffer(self, bucket: int, factor: float | None) -> None:
        if pending := self._pending_in_buffer(bucket):
            with self._meter.counted():
                self._finish_through(pending[-1], factor)
        self._inner.acquire_buffer(bucket, factor)

    def can_acquire_buffer(self, bucket: int, factor: float | None) -> bool:
        return not self._pending_in_buffer(bucket) and self._inner.can_acquire_buffer(bucket, factor)

    def _pending_in_buffer(self, bucket: int) -> list[int]:
        index = self.buffer_indices[bucket]
        return [each.bucket for each in self._pending if self.buffer_indices[each.bucket] == index]

    @torch.no_grad()
    def reduce_async(self, bucket: int, reduction_index: int | None, factor: float | None) -> None:
        with self._meter.counted():
            if reduction_index is not None:
                self._begin_grad_round(reduction_index // len(self.codecs), factor)
            run = self.codecs[bucket].reduce(self._unpadded_grads(bucket))
            result = self._send_message(bucket, 0, next(run))
            self._pending.append(_PendingReduction(bucket, reduction_index, run, result))
            self._advance_ready(factor)

    def _unpadded_grads(self, bucket: int) -> Tensor:
        """A bucket's buffer without its padding."""
        return self.grad_buffers[bucket][: self.codecs[bucket].num_elements]

    def _begin_grad_round(self, number: int, factor: float | None) -> None:
        """Begin round `number` of reductions within a step: message buffers are free once every rank has begun it."""
        if number != self._grad_round:
            if self._pending:
                self._finish_through(self._pending[-1].bucket, factor)
            if self._routes.stage_reducers:
                # Room for the next message comes only when every rank has begun this round. A rank that has not may be
                # waiting for this rank's part of the last sum.
                self._finish_handed_over(factor)
            self._end_message_step()
        self._grad_round = number

    def _end_message_step(self) -> None:
        for each in self._routes.stage_reducers:
            each.end_step()

    def _send_message(self, bucket: int, stage: int, message: Message) -> Work:
        if message.combine is Combine.GATHER:
            return self._routes.gatherer.all_gather_async(message.payload)
        reducer, index = self._routes.stage_reducers[stage], self._message_index[stage][bucket]
        reducer.acquire_buffer(index, 1.0)
        reducer.grad_buffers[index].copy_(message.payload)
        reducer.reduce_async(index, None, 1.0)
        return Work(functools.partial(_wait_total, reducer, index), functools.partial(reducer.is_reduced, index, 1.0))

    def _advance_ready(self, factor: float | None) -> None:
        """Continue the codec runs whose messages have come, without waiting.

        The messages of a stage are sent in program order, so no run may overtake an earlier one: messages arrive in
        another order on every rank, and collectives of one group pair up by order alone.
        """
        limit = math.inf
        for reduction in list(self._pending):
            while not reduction.is_done and reduction.stage < limit and reduction.message_result.is_completed():
                self._advance(reduction)
            if not reduction.is_done:
                limit = reduction.stage
        self._reduce_finished(factor)

    def _finish_through(self, bucket: int, factor: float | None) -> None:
        """Wait until the codec runs up to a bucket's have ended.

        Not further: a rank that has not launched the next bucket may be waiting for this bucket's sum.
        """
        with self._meter.recorder.waiting():
            while any(each.bucket == bucket for each in self._pending):
                # Before any wait for a later message: its sender may be waiting for this rank's part.
                self._finish_handed_over(factor)
                self._advance(self._pending[0])
                self._advance_ready(factor)

    def _finish_handed_over(self, factor: float | None) -> None:
        """Do this rank's part of the sums that it has handed to the inner reducer."""
        if self._last_handed_over is not None:
            # Without the factor only for a buffer or a round: then gradients rest split.
            assert factor is not None or not self._routes.needs_factor
            self._inner.wait_reduce(self._last_handed_over, 1.0 if factor is None else factor)
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

    def _reduce_finished(self, factor: float | None) -> None:
        """Hand the buckets whose codec runs have ended to the inner reducer, in program order."""
        while self._pending and self._pending[0].is_done:
            reduction = self._pending.popleft()
            is_sum = self.codecs[reduction.bucket].rounds[0].combine is Combine.SUM
            if is_sum and not self._routes.is_host_leader:
                self._unpadded_grads(reduction.bucket).zero_()
            self._inner.reduce_async(reduction.bucket, reduction.reduction_index, factor)
            self._last_handed_over = reduction.bucket

    def wait_reduce(self, bucket: int, factor: float) -> None:
        if any(each.bucket == bucket for each in self._pending):
            with self._meter.counted():
                self._finish_through(bucket, factor)
        self._inner.wait_reduce(bucket, factor)

    def is_reduced(self, bucket: int, factor: float | None) -> bool:
        if self._pending:
            with self._meter.counted():
                self._advance_ready(factor)
        return all(each.bucket != bucket for each in self._pending) and self._inner.is_reduced(bucket, factor)

    def end_step(self) -> None:
        self._end_message_step()
        self._grad_round, self._last_handed_over = 0, None
        self._inner.end_step()

    # ---- the inner reducer's ------------------------------------------------------------------------

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


def _wait_total(reducer: GradReducer, index: int) -> Sequence[Tensor]:
    reducer.wait_reduce(index, 1.0)
    reducer.all_gather_grads(index)
    return [reducer.grad_buffers[index]]
