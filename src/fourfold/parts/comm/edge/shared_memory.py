"""Edges over shared memory: the receiver reads a message where the sender has put it.

slot  one of the areas of the sender's region; messages take them in turn
SENT  how many messages the sender has put into its slots; RECEIVED: how many the receiver has copied out
Law: a slot is written only after the message that it held has been received: the sender waits until RECEIVED has
reached the number of messages sent, less the other slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.edge.message import TensorSpec, aligned, decode, encode, specs
from fourfold.parts.comm.shared_regions import NUM_AREAS, SharedRegions

SENT, RECEIVED = range(2)  # flags
WORD_BYTES = 8
FIRST_WORDS = 32  # that a receiver reads at once: the whole header of a message of a few tensors


class SharedMemorySender:
    """See `SendingEdge`. `receiver`: the other rank's index in the regions."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions, receiver: int) -> None:
        self._regions, self._index, self._receiver = regions, regions.place.index, receiver
        self._num_sent = 0
        self._headers: dict[tuple[TensorSpec, ...], Tensor] = {}

    def send(self, tensors: Sequence[Tensor]) -> None:
        message = specs(tensors)
        header = self._headers.get(message)
        if header is None:
            header = self._headers[message] = torch.tensor(encode(message), dtype=torch.int64)
        self._regions.wait_flag(RECEIVED, self._num_sent - NUM_AREAS + 1, self._receiver)
        sizes = [aligned(each.nbytes) for each in (header, *tensors)]
        slot = self._regions.view(self._index, self._num_sent % NUM_AREAS, sum(sizes), torch.uint8)
        start = 0
        for tensor, size in zip((header, *tensors), sizes, strict=True):
            room = slot[start : start + tensor.nbytes].view(tensor.dtype)
            room.view(tensor.shape).copy_(tensor.detach())
            start += size
        self._num_sent += 1
        self._regions.words[self._regions.word(self._index, SENT)] = self._num_sent

    def finish(self) -> None:
        pass  # what lies in a slot is on its way


class SharedMemoryReceiver:
    """See `ReceivingEdge`. `sender`: the other rank's index in the regions."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions, sender: int) -> None:
        self._regions, self._index, self._sender = regions, regions.place.index, sender
        self._num_received = 0
        self._messages: dict[tuple[int, ...], tuple[TensorSpec, ...]] = {}

    def receive(self) -> list[Tensor]:
        self._regions.wait_flag(SENT, self._num_received + 1, self._sender)
        message, start = self._message()
        num_bytes = start + sum(aligned(spec.num_bytes) for spec in message)
        slot = self._slot(num_bytes, torch.uint8)
        tensors = []
        for spec in message:
            view = slot[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
            tensors.append(view.clone().requires_grad_(spec.needs_gradient))
            start += aligned(spec.num_bytes)
        self._num_received += 1
        self._regions.words[self._regions.word(self._index, RECEIVED)] = self._num_received
        return tensors

    def _message(self) -> tuple[tuple[TensorSpec, ...], int]:
        """What the next message holds, and where its first tensor begins."""
        words = tuple(self._slot(FIRST_WORDS, torch.int64).tolist())
        length = words[0] + 1
        if length > FIRST_WORDS:
            words = tuple(self._slot(length, torch.int64).tolist())
        message = self._messages.get(words[:length])
        if message is None:
            message = self._messages[words[:length]] = decode(words)
        return message, aligned(length * WORD_BYTES)

    def _slot(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._regions.view(self._sender, self._num_received % NUM_AREAS, num_elements, dtype)
