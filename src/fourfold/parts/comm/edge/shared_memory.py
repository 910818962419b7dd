"""Edges over shared memory: the receiver reads a message where the sender has put it.

slot      one of the areas of the sender's region, which holds one message
lent      a slot whose message the receiver's tensors still read: autograd keeps an activation until its backward
SENT      how many messages the sender has put into slots; SLOTS: into which, by message number modulo NUM_SLOTS
RELEASED  by slot: how many of its messages the receiver no longer reads
Law: a slot is written only when nothing reads the message that it held. It is released when the last tensor of that
message is freed, whoever holds it: autograd, the step, or the user.

At most MAX_LENT slots are lent, so that the sender always finds a slot when the receiver has come to the messages
before: what arrives beyond is copied.
"""

import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.edge.message import TensorSpec, aligned, decode, encode, specs
from fourfold.parts.comm.shared_regions import SharedRegions

NUM_SLOTS = 16
MAX_LENT = NUM_SLOTS - 4
SENT, RELEASED, SLOTS = 0, 1, 3  # flags; the latter two are NUM_SLOTS words, two lines
WORD_BYTES = 8
FIRST_WORDS = 32  # that a receiver reads at once: the whole header of a message of a few tensors


Message = tuple[TensorSpec, ...]


class SharedMemorySender:
    """See `SendingEdge`. `receiver`: the other rank's index in the regions."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions, receiver: int) -> None:
        self._regions, self._index, self._receiver = regions, regions.place.index, receiver
        self._released = regions.word(receiver, RELEASED)
        self._num_sent = 0
        self._num_written = [0] * NUM_SLOTS
        """By slot: how many messages it has held."""
        self._rooms: list[tuple[Message, list[Tensor]]] = [((), [])] * NUM_SLOTS
        """By slot: what the last message there held, and where its tensors lie."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        message, slot = specs(tensors), self._free_slot()
        while slot is None:
            self._regions.wait(lambda: self._free_slot() is not None, self._receiver)
            slot = self._free_slot()
        last, rooms = self._rooms[slot]
        if message != last or not self._num_written[slot]:
            rooms = self._make_rooms(slot, message)
        for room, tensor in zip(rooms, tensors, strict=True):
            room.copy_(tensor.detach())
        self._num_written[slot] += 1
        words, line = self._regions.words, self._regions.word(self._index, SLOTS)
        words[line + self._num_sent % NUM_SLOTS] = slot
        self._num_sent += 1
        words[self._regions.word(self._index, SENT)] = self._num_sent

    def _make_rooms(self, slot: int, message: Message) -> list[Tensor]:
        """Reserve a slot for a message and write its header there. Returns where its tensors lie."""
        header = array("q", encode(message))
        start = aligned(len(header) * WORD_BYTES)
        num_bytes = start + sum(aligned(spec.num_bytes) for spec in message)
        area = self._regions.view(self._index, slot, num_bytes, torch.uint8)
        self._regions.area_words(self._index, slot, len(header))[:] = memoryview(header)
        rooms = []
        for spec in message:
            rooms.append(area[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape))
            start += aligned(spec.num_bytes)
        self._rooms[slot] = message, rooms
        return rooms

    def finish(self) -> None:
        pass  # what lies in a slot is on its way

    def _free_slot(self) -> int | None:
        """The first slot that nothing reads: few are used in turn, and stay in the caches."""
        words, first = self._regions.words, self._released
        for slot, written in enumerate(self._num_written):
            if words[first + slot] == written:
                return slot
        return None


class SharedMemoryReceiver:
    """See `ReceivingEdge`. `sender`: the other rank's index in the regions."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions, sender: int) -> None:
        self._regions, self._index, self._sender = regions, regions.place.index, sender
        self._num_received = 0
        self._loans: dict[int, weakref.ref[memoryview]] = {}
        """By slot that is lent: the memory that its tensors read."""
        self._messages: dict[tuple[int, ...], Message] = {}

    def receive(self) -> list[Tensor]:
        regions = self._regions
        regions.wait_flag(SENT, self._num_received + 1, self._sender)
        slot = regions.words[regions.word(self._sender, SLOTS, self._num_received % NUM_SLOTS)]
        message, start = self._message(slot)
        memory = regions.area_bytes(self._sender, slot, start + sum(aligned(spec.num_bytes) for spec in message))
        is_lent = len(self._loans) < MAX_LENT
        tensors = []
        for spec in message:
            tensor = _tensor_in(memory, start, spec)
            tensors.append((tensor if is_lent else tensor.clone()).requires_grad_(spec.needs_gradient))
            start += aligned(spec.num_bytes)
        self._num_received += 1
        self._release_with(memory, slot)
        return tensors

    def _release_with(self, memory: memoryview, slot: int) -> None:
        """Release a slot as soon as nothing holds this object: each tensor that reads the slot holds it."""
        loans, words, word = self._loans, self._regions.words, self._regions.word(self._index, RELEASED, slot)

        def release(_: object) -> None:
            del loans[slot]
            words[word] += 1

        loans[slot] = weakref.ref(memory, release)

    def _message(self, slot: int) -> tuple[Message, int]:
        """What the message in a slot holds, and where its first tensor begins."""
        words = self._regions.area_words(self._sender, slot, FIRST_WORDS).tolist()
        length = words[0] + 1
        if length > FIRST_WORDS:
            words = self._regions.area_words(self._sender, slot, length).tolist()
        header = tuple(words[:length])
        message = self._messages.get(header)
        if message is None:
            message = self._messages[header] = decode(header)
        return message, aligned(length * WORD_BYTES)


def _tensor_in(memory: memoryview, start: int, spec: TensorSpec) -> Tensor:
    """A tensor of a message, in place. Each has a storage of its own: writing to one is no write to the others."""
    if not spec.num_elements:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(memory, dtype=spec.dtype, count=spec.num_elements, offset=start).view(spec.shape)
