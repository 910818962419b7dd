"""Coded: a transport whose gradients travel as the messages of codecs.

talk   of a bucket: begins when the bucket is launched, goes on when its sum is needed
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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.parts.codec import Codec, Message, Talk
from fourfold.parts.comm.transport import Part, Transport
from fourfold.plan.codec import Meet
from fourfold.words.spans import Recorder


class Wire(Protocol):
    """Ranks that gather each other's messages."""

    sent_bytes: float

    def gather(self, payload: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin to bring the messages [bytes] of all to all; the returned function waits, and gives them in order."""
        ...


class NoWire:
    """A rank whose messages nobody else needs: the others read its sums in memory."""

    sent_bytes = 0.0

    def gather(self, payload: Tensor) -> Callable[[], Sequence[Tensor]]:
        return lambda: [payload]


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
    """A talk that has not ended: its bucket, what its reduction is called, and how to get what it waits for."""

    bucket: int
    name: int
    talk: Talk
    land: Callable[[], Sequence[Tensor]]
    round: int = 0
    ended: bool = False


class Coded:
    """See `Transport`; `codecs` has one for each bucket."""

    def __init__(self, ways: Ways, codecs: Sequence[Codec]) -> None:
        self._inner, self._sums, self._wire, self._tells = ways
        self.codecs = codecs
        self.name, self.size, self.index = self._inner.name, self._inner.size, self._inner.index
        self.slots, self.turns = self._inner.slots, self._inner.turns
        self.weights, self.writes = self._inner.weights, self._inner.writes
        self._places = places(codecs)
        self._talking: list[_Talking] = []
        self._round, self._coding_seconds = 0, 0.0

    @property
    def recorder(self) -> Recorder:
        return self._inner.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._inner.recorder = recorder

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
            codec.scale(factor)

    # ---- talks --------------------------------------------------------------------------------------

    def lend(self, bucket: int) -> None:
        if any(self.turns[each.bucket] == self.turns[bucket] for each in self._talking):
            self._finish()
        self._inner.lend(bucket)

    @torch.no_grad()
    def launch(self, bucket: int, name: int) -> None:
        with self._timed():
            self._turn_to(name // len(self.codecs))
            codec = self.codecs[bucket]
            talk = codec.talk(self._flat(bucket))
            message = next(talk)
            talking = _Talking(bucket, name, talk, land=list)
            self._say(talking, message)
            self._talking.append(talking)
            if message.meet is Meet.GATHER and isinstance(self._wire, NoWire):
                self._finish()

    def _flat(self, bucket: int) -> Tensor:
        """A slot without its padding."""
        return self.slots[bucket][: self.codecs[bucket].length]

    def _turn_to(self, number: int) -> None:
        """Begin a further round of reductions in the same step: messages are written again, when all have read them."""
        if number != self._round:
            self._finish()
            for each in self._sums:
                each.close()
        self._round = number

    def _say(self, talking: _Talking, message: Message) -> None:
        """Send a message on its way. Does not wait for the others'."""
        if message.meet is Meet.GATHER:
            talking.land = self._wire.gather(message.payload)
            return
        transport, place = self._sums[talking.round], self._places[talking.round][talking.bucket]
        transport.lend(place)
        transport.slots[place].copy_(message.payload)
        transport.launch(place, talking.name)
        talking.land = functools.partial(_total, transport, place)

    def _finish(self) -> None:
        """End the talks that have begun: of all a round, then of all the next, so that messages travel together."""
        with self.recorder.waiting():
            while any(not each.ended for each in self._talking):
                for talking in [each for each in self._talking if not each.ended]:
                    self._go_on(talking)
        for talking in self._talking:
            if not self._tells and self.codecs[talking.bucket].rounds[0].meet is Meet.SUM:
                self._flat(talking.bucket).zero_()
            self._inner.launch(talking.bucket, talking.name)
        self._talking.clear()

    @torch.no_grad()
    def _go_on(self, talking: _Talking) -> None:
        try:
            message = talking.talk.send(talking.land())
        except StopIteration:
            talking.ended = True
            return
        talking.round += 1
        self._say(talking, message)

    def complete(self, bucket: int) -> None:
        if self._talking:
            with self._timed():
                self._finish()
        self._inner.complete(bucket)

    def close(self) -> None:
        for each in self._sums:
            each.close()
        self._round = 0
        self._inner.close()

    # ---- as the inner transport has it ----------------------------------------------------------------

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

    def publish(self, bucket: int, weight: Tensor) -> None:
        self._inner.publish(bucket, weight)

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
