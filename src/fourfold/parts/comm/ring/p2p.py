"""Ring over messages: blocks and sums are passed on from each rank to its right neighbour.

channel  what carries the messages: a process group, or queues of threads
tag      separates blocks from sums; messages with the same tag arrive in order
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring.protocol import RingAccumulator, concat_flat
from fourfold.words.trace_events import RING_SPAN

PendingRecv = Callable[[], Tensor]


BLOCK_TAG, SUM_TAG = range(2)


class P2PChannel(Protocol):
    """Carries messages between the ranks of a ring."""

    name: str
    size: int
    index: int
    meter: CommMeter

    def send_right_recv_left(self, flat: Tensor, tag: int) -> PendingRecv:
        """Begin to send to the right neighbour. Returns the wait for what the left neighbour sends."""
        ...

    def all_gather(self, flat: Tensor) -> Tensor:
        """[n] -> [size, n]"""
        ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """[size, n], row i for rank i -> [size, n], row i from rank i."""
        ...


class RingOverP2P:
    """See `RingGroup`."""

    def __init__(self, channel: P2PChannel) -> None:
        self._channel = channel
        self.name, self.size, self.index, self.meter = channel.name, channel.size, channel.index, channel.meter

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        block = concat_flat(parts)
        for hop in range(self.size):
            wait = _send_recv(self._channel, block, BLOCK_TAG) if hop < self.size - 1 else None
            yield (self.index - hop) % self.size, block
            if wait is not None:
                block = wait()

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        return _P2PAccumulator(self._channel, torch.zeros(num_elements, dtype=dtype, device=device))

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._channel.all_gather(concat_flat(parts)).unbind()

    def all_to_all(self, parts: Tensor) -> Tensor:
        return self._channel.all_to_all(parts)


class _P2PAccumulator:
    """See `RingAccumulator`. `zeros`: the first sum, which this rank passes on."""

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
    end_span, recv = channel.meter.recorder.sending(RING_SPAN), channel.send_right_recv_left(flat, tag)

    def wait() -> Tensor:
        received = recv()
        end_span()
        return received

    return wait
