"""Edges of a pipeline: messages between neighbouring stages, over shared memory, or over gloo or NCCL.

message   a few tensors, and whether each of them requires a gradient
header    int64 words: its length, then for each tensor its dtype, whether it requires a gradient, its dims
slot      one of the areas of the sender's region, which holds one message
lent      a slot whose message the receiver's tensors still read: autograd keeps an activation until its backward
SENT      how many messages the sender has put into slots; SLOTS: into which, by message number modulo NUM_SLOTS
RELEASED  by slot: how many of its messages the receiver no longer reads
Law: both ends of an edge choose the same transport, from what all ranks of the pipeline have said of themselves.
Law: messages arrive in the order in which they were sent. A receiver owns what it receives.
Law: over a process group, a header, then each tensor of a message as bytes, in order; sender and receiver alone are in
the group. A received tensor lies in a buffer that is used again once nothing reads it: there are as many as the
schedule has in flight.
Law: a slot is written only when nothing reads the message that it held. It is released when the last tensor of that
message is freed, whoever holds it: autograd, the step, or the user.

At most MAX_LENT slots are lent, so that the sender always finds a slot when the receiver has come to the messages
before: what arrives beyond is copied.
"""

import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.comm.collectives import DTYPES, Work
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import SharedRegions, choose_regions
from fourfold.torch_kit.memory import BufferPool
from fourfold.words.errors import Problem, TaskError

# ---- what an edge does ---------------------------------------------------------------------------------------------


class SendingEdge(Protocol):
    """The end of an edge at which messages are sent."""

    name: str

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Begin to send a message. The tensors may be freed or written afterwards."""
        ...

    def finish(self) -> None:
        """Wait until all messages are on their way."""
        ...


class ReceivingEdge(Protocol):
    """The end of an edge at which messages arrive."""

    name: str

    def receive(self) -> list[Tensor]:
        """The next message. Raises PeerError if the sender has died."""
        ...


class StageEdges(NamedTuple):
    """The edges of this rank; None beyond the first and the last stage."""

    to_next: SendingEdge | None = None
    from_previous: ReceivingEdge | None = None
    to_previous: SendingEdge | None = None
    from_next: ReceivingEdge | None = None

    @property
    def senders(self) -> list[SendingEdge]:
        """The ends at which this rank sends."""
        return [edge for edge in (self.to_next, self.to_previous) if edge is not None]

    @property
    def name(self) -> str:
        """What carries the messages, in words."""
        return " and ".join(dict.fromkeys(edge.name for edge in reversed(self.senders))) or "none"


# ---- messages ------------------------------------------------------------------------------------------------------

ALIGNMENT_BYTES = 64


class TensorSpec(NamedTuple):
    """A tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """What a message of these tensors holds."""
    return tuple(TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)


def encode(message: Sequence[TensorSpec]) -> list[int]:
    """The header of a message."""
    words = []
    for spec in message:
        words += [DTYPES.index(spec.dtype), int(spec.needs_gradient), len(spec.shape), *spec.shape]
    return [len(words), *words]


def decode(words: Sequence[int]) -> tuple[TensorSpec, ...]:
    """What the message with this header holds; words behind the header are ignored."""
    message, place, stop = [], 1, 1 + words[0]
    while place < stop:
        dtype, needs_gradient, num_dims = words[place : place + 3]
        place += 3
        message.append(TensorSpec(tuple(words[place : place + num_dims]), DTYPES[dtype], bool(needs_gradient)))
        place += num_dims
    return tuple(message)


def aligned(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---- over a process group ------------------------------------------------------------------------------------------

HEADER_WORDS = 128


class ProcessGroupSender:
    """See `SendingEdge`. `receiver`: its index in the communicator. Making it is collective between the two."""

    def __init__(self, comm: Communicator, receiver: int, meter: CommMeter, purpose: str) -> None:
        self.name = comm.backend
        self._comm, self._meter, self._receiver = comm, meter, receiver
        self._group = comm.get_group([comm.rank, receiver], purpose)
        self._pending: list[Work] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        words = encode(specs(tensors))
        if len(words) > HEADER_WORDS:
            got = f"a message of {len(tensors)} tensors between two stages"
            raise TaskError(Problem(got, f"at most {HEADER_WORDS // 8} tensors"), where="the pipeline")
        header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        header[: len(words)] = torch.tensor(words)
        self._pending = [each for each in self._pending if not each.is_completed()]
        for tensor in (header.to(self._comm.device), *tensors):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if flat.numel():
                self._meter.sent_bytes += flat.numel()
                self._pending.append(self._group.send(flat, self._receiver))

    def finish(self) -> None:
        with self._meter.timed():
            for work in self._pending:
                work.wait()
        self._pending = []


class ProcessGroupReceiver:
    """See `ReceivingEdge`. `sender`: its index in the communicator. Making it is collective between the two."""

    def __init__(self, comm: Communicator, sender: int, meter: CommMeter, purpose: str) -> None:
        self.name = comm.backend
        self._comm, self._meter, self._sender = comm, meter, sender
        self._group = comm.get_group([sender, comm.rank], purpose)
        self.buffers = BufferPool()

    def receive(self) -> list[Tensor]:
        header = torch.zeros(HEADER_WORDS, dtype=torch.int64, device=self._comm.device)
        self._receive(header)
        tensors = []
        for spec in decode(header.tolist()):
            tensor = self._room(spec)
            self._receive(tensor)
            tensors.append(tensor.requires_grad_(spec.needs_gradient))
        return tensors

    def _room(self, spec: TensorSpec) -> Tensor:
        if not spec.num_elements:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self._comm.device)
        return self.buffers.acquire(spec.num_elements, spec.dtype, self._comm.device).view(spec.shape)

    def _receive(self, tensor: Tensor) -> None:
        flat = tensor.view(-1).view(torch.uint8)
        if flat.numel():
            with self._meter.timed():
                self._group.receive(flat, self._sender)


# ---- over shared memory --------------------------------------------------------------------------------------------

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


# ---- edges of a pipeline -------------------------------------------------------------------------------------------


def make_edges(pipeline: Communicator, meter: CommMeter, *, choice: str = "auto", is_ring: bool = False) -> StageEdges:
    """The edges of this rank to its neighbours among the ranks of a pipeline. Collective.

    choice   the plan's transport
    is_ring  the last rank is followed by the first one, which has a later stage too

    Raises PlanError if the plan asks for a transport that cannot be had.
    """
    size, edges = pipeline.size, StageEdges()
    # A rank has two neighbours: pairs that begin with an even index, then those that begin with an odd one.
    rounds = [[(start, start + 1) for start in range(parity, size - 1, 2)] for parity in range(min(2, size - 1))]
    links = [_connect(pipeline, pairs, meter, choice, "edge") for pairs in rounds]
    if is_ring:  # groups of its own: with two ranks, both edges are between the same ones
        links.append(_connect(pipeline, [(size - 1, 0)], meter, choice, "ring edge"))
    for link in links:
        if link is not None:
            is_first, sender, receiver = link
            ends = {"to_next": sender, "from_next": receiver}
            edges = edges._replace(**(ends if is_first else {"to_previous": sender, "from_previous": receiver}))
    return edges


def connect_pair(
    pipeline: Communicator, first: int, second: int, meter: CommMeter, *, choice: str = "auto"
) -> tuple[SendingEdge, ReceivingEdge] | None:
    """This rank's ends of two edges between two ranks of a pipeline; None if it is neither. Collective among all."""
    link = _connect(pipeline, [(first, second)], meter, choice, "tied")
    return None if link is None else link[1:]


def _connect(
    pipeline: Communicator, pairs: Sequence[tuple[int, int]], meter: CommMeter, choice: str, purpose: str
) -> tuple[bool, SendingEdge, ReceivingEdge] | None:
    """Whether this rank is the first of its pair, which sends activations, and its ends of both edges. Collective."""
    paired = {each for pair in pairs for each in pair}
    groups = [*pairs, *((each,) for each in range(pipeline.size) if each not in paired)]
    regions = choose_regions(pipeline, groups, meter, choice=choice, num_areas=NUM_SLOTS)
    pair = next((each for each in pairs if pipeline.rank in each), None)
    if pair is None:
        return None
    index = pair.index(pipeline.rank)
    if regions is not None:
        return index == 0, SharedMemorySender(regions, 1 - index), SharedMemoryReceiver(regions, 1 - index)
    neighbour = pair[1 - index]
    if index == 0:  # both make the two groups in one order
        sender = ProcessGroupSender(pipeline, neighbour, meter, purpose)
        return True, sender, ProcessGroupReceiver(pipeline, neighbour, meter, purpose)
    receiver = ProcessGroupReceiver(pipeline, neighbour, meter, purpose)
    return False, ProcessGroupSender(pipeline, neighbour, meter, purpose), receiver
