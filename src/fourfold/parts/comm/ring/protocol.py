"""Links: ranks that show each other blocks: the places of a ring, or those that exchange heads.

block   a flat of the same length and dtype on every rank; here K and V of a rank's tokens, in one message
visit   the blocks of all, one after the other: one's own, then that of the place before, and so on
carry   sums that end at their owner: each rank adds its part for the owner that it is visited by, its own last
wire    what messages are sent by: a process group, or queues of threads
Law: all ranks of a link do the same things with it in the same order. What a visit shows is to be read before the
next one is asked for, and never written.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.words.trace_events import NULL_RECORDER, RING_SPAN, Recorder

PendingRecv = Callable[[], Tensor]
BLOCK_TAG, SUM_TAG = range(2)  # the lanes of a wire: messages of one lane arrive in order


class RingAccumulator(Protocol):
    """Sums on their way to their owners; `take` and `give` by turns, size − 1 times, then `own`."""

    def receive(self) -> Tensor:
        """What the ranks before have added up for the owner of the block visited now; zeros if there are none."""
        ...

    def send(self) -> None:
        """This rank has added its part to what it took."""
        ...

    def result(self) -> Tensor:
        """What all others have added up for this rank."""
        ...


class RingGroup(Protocol):
    """This rank's view of the ranks of a link."""

    name: str
    size: int
    index: int

    @property
    def sent_bytes(self) -> float:
        """Given to process groups, since the start."""
        ...

    @property
    def waiting_seconds(self) -> float:
        """Spent waiting for others, since the start."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Told of waits."""
        ...

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None: ...

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(owner, its block: its parts, one after the other), for all. To be read to the end.

        The next one is on its way while one is looked at.
        """
        ...

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        """Begin sums of this length."""
        ...

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The blocks of all, by index; this rank's to keep."""
        ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """parts [size, n], one for each rank -> [size, n], what each rank had for this one."""
        ...


class NullRingGroup:
    """One rank; see `Link`."""

    name = "alone"
    size, index = 1, 0

    def __init__(self) -> None:
        self.sent_bytes, self.waiting_seconds, self.recorder = 0.0, 0.0, NULL_RECORDER

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        yield 0, _concat(parts)

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        return _NullAccumulator(torch.zeros(num_elements, dtype=dtype, device=device))

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [_concat(parts)]

    def all_to_all(self, parts: Tensor) -> Tensor:
        return parts


class _NullAccumulator:
    """What nobody else adds to; see `Carry`."""

    def __init__(self, zeros: Tensor) -> None:
        self._zeros = zeros

    def receive(self) -> Tensor:
        raise AssertionError("one rank is visited by nobody")

    def send(self) -> None:
        raise AssertionError("one rank gives nothing away")

    def result(self) -> Tensor:
        return self._zeros


class P2PChannel(Protocol):
    """What messages are sent by."""

    name: str
    size: int
    index: int
    sent_bytes: float
    waiting_seconds: float
    recorder: Recorder

    def send_right_recv_left(self, flat: Tensor, tag: int) -> PendingRecv:
        """Begin to send to the next place; what lands is what the place before has sent."""
        ...

    def all_gather(self, flat: Tensor) -> Tensor:
        """[n] -> [size, n]"""
        ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """[size, n], one row for each rank -> [size, n], the row of each rank for this one."""
        ...


class RingOverP2P:
    """A link whose blocks are handed on from place to place; see `Link`."""

    def __init__(self, channel: P2PChannel) -> None:
        self._channel = channel
        self.name, self.size, self.index = channel.name, channel.size, channel.index

    @property
    def sent_bytes(self) -> float:
        return self._channel.sent_bytes

    @property
    def waiting_seconds(self) -> float:
        return self._channel.waiting_seconds

    @property
    def recorder(self) -> Recorder:
        return self._channel.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._channel.recorder = recorder

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        block = _concat(parts)
        for hop in range(self.size):
            land = _send_recv(self._channel, block, BLOCK_TAG) if hop < self.size - 1 else None
            yield (self.index - hop) % self.size, block
            if land is not None:
                block = land()

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        return _P2PAccumulator(self._channel, torch.zeros(num_elements, dtype=dtype, device=device))

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._channel.all_gather(_concat(parts)).unbind()

    def all_to_all(self, parts: Tensor) -> Tensor:
        return self._channel.all_to_all(parts)


class _P2PAccumulator:
    """Sums handed on from place to place; see `Carry`. `zeros` are this rank's, to begin with."""

    def __init__(self, channel: P2PChannel, zeros: Tensor) -> None:
        self._channel, self._sum = channel, zeros
        self._pending_recv: PendingRecv | None = None

    def receive(self) -> Tensor:
        if self._pending_recv is not None:
            self._sum = self._pending_recv()
        return self._sum

    def send(self) -> None:
        self._pending_recv = _send_recv(self._channel, self._sum, SUM_TAG)

    def result(self) -> Tensor:
        return self.receive()


def _send_recv(channel: P2PChannel, flat: Tensor, tag: int) -> PendingRecv:
    told, shifted = channel.recorder.sending(RING_SPAN), channel.send_right_recv_left(flat, tag)

    def wait() -> Tensor:
        taken = shifted()
        told()
        return taken

    return wait


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def reduce_scatter(ring: RingGroup, parts: Tensor) -> Tensor:
    """parts [size, n], this rank's addends for each -> [n], the sum of all ranks' for this one, in rank order."""
    return ring.all_to_all(parts).sum(0)
