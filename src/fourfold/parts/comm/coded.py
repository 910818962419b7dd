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
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.parts.codec import Codec, CodecReduction, Message
from fourfold.parts.comm.split import Flight, landed
from fourfold.parts.comm.transport import Part, Transport
from fourfold.plan.codec import Meet
from fourfold.words.spans import Recorder

ENDED = math.inf


class Wire(Protocol):
    """Ranks that gather each other's messages."""

    sent_bytes: float

    def gather(self, payload: Tensor) -> Flight:
        """Begin to bring the messages [bytes] of all to all; what lands are they, in order."""
        ...


class NoWire:
    """A rank whose messages nobody else needs: the others read its sums in memory."""

    sent_bytes = 0.0

    def gather(self, payload: Tensor) -> Flight:
        return Flight(lambda: [payload], landed)


class Ways(NamedTuple):
    """How messages travel: the inner transport, one for each round of sums, and the wire.

    `tells`: whether this rank is the one of its host that hands the sums of messages to the inner transport.
    """

    inner: Transport
    sums: Sequence[Transport]
    wire: Wire
    tells: bool


@dataclass
class _Talking:
    """A bucket's talk, what its reduction is called, and the message that is on its way, of which round."""

    bucket: int
    name: int
    talk: CodecReduction
    flight: Flight
    round: float = 0


class Coded:
    """See `Transport`; `codecs` has one for each bucket."""

    def __init__(self, ways: Ways, codecs: Sequence[Codec]) -> None:
        self._inner, self._sums, self._wire, self._tells = ways
        self.codecs = codecs
        self.name, self.size, self.index = self._inner.name, self._inner.size, self._inner.index
        self.slots, self.turns = self._inner.slots, self._inner.turns
        self.weights, self.writes = self._inner.weights, self._inner.writes
        self.gathers, self.replica = self._inner.gathers, self._inner.replica
        self._places = places(codecs)
        self._talking: deque[_Talking] = deque()
        self._handed_over: int | None = None
        self._round, self._coding_seconds = 0, 0.0

    @property
    def recorder(self) -> Recorder:
        return self._inner.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._inner.recorder = recorder

    @property
    def factor(self) -> Callable[[], float]:
        return self._inner.factor

    @factor.setter
    def factor(self, factor: Callable[[], float]) -> None:
        self._inner.factor = factor

    @property
    def waiting_seconds(self) -> float:
        return self._inner.waiting_seconds + self._coding_seconds

    @property
    def sent_bytes(self) -> float:
        return self._inner.sent_bytes + self._wire.sent_bytes + sum(each.sent_bytes for each in self._sums)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin, waited = time.perf_counter(), self._inner.waiting_seconds
        yield
        self._coding_seconds += time.perf_counter() - begin - (self._inner.waiting_seconds - waited)

    def rescale(self, factor: float) -> None:
        """Gradients are from now on measured in another unit: multiply what is remembered."""
        for codec in self.codecs:
            codec.scale_residual(factor)

    # ---- talks --------------------------------------------------------------------------------------

    def lend(self, bucket: int) -> None:
        same = [each.bucket for each in self._talking if self.turns[each.bucket] == self.turns[bucket]]
        if same:
            with self._timed():
                self._finish(same[-1])
        self._inner.lend(bucket)

    @torch.no_grad()
    def launch(self, bucket: int, name: int) -> None:
        with self._timed():
            self._turn_to(name // len(self.codecs))
            talk = self.codecs[bucket].reduce(self._flat(bucket))
            message = next(talk)
            self._talking.append(_Talking(bucket, name, talk, self._say(bucket, 0, message)))
            self._listen()

    def _flat(self, bucket: int) -> Tensor:
        """A slot without its padding."""
        return self.slots[bucket][: self.codecs[bucket].num_elements]

    def _turn_to(self, number: int) -> None:
        """Begin a further round of reductions in the same step: messages are written again, when all have read them."""
        if number != self._round:
            if self._talking:
                self._finish(self._talking[-1].bucket)
            for each in self._sums:
                each.close()
        self._round = number

    def _say(self, bucket: int, number: int, message: Message) -> Flight:
        """Send a message of a round on its way."""
        if message.combine is Meet.GATHER:
            return self._wire.gather(message.payload)
        transport, place = self._sums[number], self._places[number][bucket]
        transport.lend(place)
        transport.slots[place].copy_(message.payload)
        transport.launch(place, place)
        return Flight(functools.partial(_total, transport, place), functools.partial(transport.is_complete, place))

    def _listen(self) -> None:
        """Go on with the talks whose messages are there, without waiting.

        Messages of a round are said in program order: a talk must not overtake those before it.
        """
        reached = ENDED
        for talking in list(self._talking):
            while talking.round < reached and talking.flight.has_landed():
                self._go_on(talking)
            reached = talking.round
            if reached == 0:
                break
        self._hand_over()

    def _finish(self, bucket: int) -> None:
        """Wait for the ends of the talks up to a bucket's.

        No further: a rank that has not launched the next bucket may be waiting for the sum of this one.
        """
        with self.recorder.waiting():
            while any(each.bucket == bucket for each in self._talking):
                if self._handed_over is not None:
                    # Before any wait for a later message: who is to send it may be waiting for this rank's part.
                    self._inner.complete(self._handed_over)
                    self._handed_over = None
                self._go_on(self._talking[0])
                self._listen()

    @torch.no_grad()
    def _go_on(self, talking: _Talking) -> None:
        try:
            message = talking.talk.send(talking.flight.land())
        except StopIteration:
            talking.round = ENDED
            return
        talking.round += 1
        talking.flight = self._say(talking.bucket, int(talking.round), message)

    def _hand_over(self) -> None:
        """Give the inner transport the buckets whose talks have ended, in program order."""
        while self._talking and self._talking[0].round == ENDED:
            talking = self._talking.popleft()
            if not self._tells and self.codecs[talking.bucket].rounds[0].meet is Meet.SUM:
                self._flat(talking.bucket).zero_()
            self._inner.launch(talking.bucket, talking.name)
            self._handed_over = talking.bucket

    def complete(self, bucket: int) -> None:
        if any(each.bucket == bucket for each in self._talking):
            with self._timed():
                self._finish(bucket)
        self._inner.complete(bucket)

    def is_complete(self, bucket: int) -> bool:
        if self._talking:
            with self._timed():
                self._listen()
        return all(each.bucket != bucket for each in self._talking) and self._inner.is_complete(bucket)

    def close(self) -> None:
        for each in self._sums:
            each.close()
        self._round, self._handed_over = 0, None
        self._inner.close()

    def enter(self, call: str) -> None:
        self._inner.enter(call)

    def agree(self) -> None:
        self._inner.agree()

    # ---- as the inner transport has it ----------------------------------------------------------------

    def is_free(self, bucket: int) -> bool:
        same = any(self.turns[each.bucket] == self.turns[bucket] for each in self._talking)
        return not same and self._inner.is_free(bucket)

    def bring(self, bucket: int, share: Tensor, out: Tensor) -> Callable[[], None]:
        return self._inner.bring(bucket, share, out)

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        return self._inner.hear(row)

    def take(self, bucket: int, start: int, stop: int, factor: float) -> None:
        self._inner.take(bucket, start, stop, factor)

    def settle(self, bucket: int) -> None:
        self._inner.settle(bucket)

    def sums(self, bucket: int) -> Sequence[Part]:
        return self._inner.sums(bucket)

    def own(self, bucket: int) -> Part:
        return self._inner.own(bucket)

    def scale(self, factor: float) -> None:
        self._inner.scale(factor)

    def gather(self, bucket: int) -> None:
        self._inner.gather(bucket)

    def permit(self) -> None:
        self._inner.permit()

    def permitted(self) -> None:
        self._inner.permitted()

    def publish(self, bucket: int, weight: Tensor) -> None:
        self._inner.publish(bucket, weight)

    def arrive(self, bucket: int) -> None:
        self._inner.arrive(bucket)

    def spread(self) -> None:
        self._inner.spread()

    def measure(self, kind: int, values: Tensor) -> None:
        self._inner.measure(kind, values)

    def measured(self, kind: int) -> list[float]:
        return self._inner.measured(kind)


def places(codecs: Sequence[Codec]) -> list[dict[int, int]]:
    """By round of sums: the place of each bucket that has one among that round's messages."""
    num_rounds = max(len(codec.rounds) for codec in codecs)
    result = []
    for number in range(num_rounds):
        those = [
            bucket
            for bucket, codec in enumerate(codecs)
            if number < len(codec.rounds) and codec.rounds[number].meet is Meet.SUM
        ]
        result.append({bucket: place for place, bucket in enumerate(those)})
    return [each for each in result if each]


def _total(transport: Transport, place: int) -> Sequence[Tensor]:
    transport.complete(place)
    transport.gather(place)
    return [transport.slots[place]]
