"""TODO."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.parts.comm.ring.protocol import RingAccumulator, concat_flat
from fourfold.words.trace_events import RING_SPAN, Recorder

PendingRecv = Callable[[], Tensor]


BLOCK_TAG, SUM_TAG = range(2)  # the lanes of a wire: messages of one lane arrive in order


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
        block = concat_flat(parts)
        for hop in range(self.size):
            land = _send_recv(self._channel, block, BLOCK_TAG) if hop < self.size - 1 else None
            yield (self.index - hop) % self.size, block
            if land is not None:
                block = land()

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        return _P2PAccumulator(self._channel, torch.zeros(num_elements, dtype=dtype, device=device))

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._channel.all_gather(concat_flat(parts)).unbind()

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
