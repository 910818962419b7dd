"""Rings: ranks of a sequence that exchange blocks, over shared memory, or messages over gloo or NCCL.

block        a flat tensor of the same length and dtype on every rank; here K and V of a rank's tokens, in one message
iteration    `iterate_blocks`: this rank's own block, then its left neighbour's, and so on round the ring
accumulator  sums that end at their owner: each rank adds its part for the block that it looks at, its own last
channel      what carries messages: a process group, or queues of threads
tag          separates blocks from sums; messages with the same tag arrive in order
region       one rank's part of shared memory, with its flags and areas; see `SharedRegions`
publish      put a block where the other ranks read it, in one of two areas alternately
sum          what the other ranks have added up for a rank, in one of two areas of that rank's region alternately
Law: the ranks of a sequence choose the same transport, from what all of them have said of themselves. They do the same
things with it in the same order. A block is read before the next one is asked for, and never written.
Law: in shared memory a block stays unchanged until all have read it. A rank that publishes for the third time has read
every second block, and each of these was published after its rank had read every first one. So two areas are enough,
and no rank has to say what it has read. One rank at a time writes a sum, in the order of the ring (`ACCUMULATED`); two
areas are enough for the same reason.

There nothing is sent: of the 6 (N−1) · B · H · L/N elements of a layer, each rank copies its own K and V twice, and
adds to the sums of others in place. The order of addition is that of messages, so both give the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.comm.collectives import all_gather
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import SharedRegions, open_regions
from fourfold.comm.transports import check_transport_device, no_shared_memory
from fourfold.words.errors import DivergenceError, Problem
from fourfold.words.trace_events import RING_SPAN

# ---- what a ring group does ----------------------------------------------------------------------------------------


class RingAccumulator(Protocol):
    """Sums on their way to their owners: `receive` and `send` alternate, size − 1 times each, then `result`."""

    def receive(self) -> Tensor:
        """The sum so far for the owner of the current block; zeros on the first rank to add. Add to it in place."""
        ...

    def send(self) -> None:
        """This rank has added its part: pass the sum on."""
        ...

    def result(self) -> Tensor:
        """The sum of all other ranks' parts for this rank."""
        ...


class RingGroup(Protocol):
    """This rank's view of the group."""

    name: str
    size: int
    index: int
    meter: CommMeter
    """That of this rank: it counts and records what the group sends and waits for."""

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yields (owner, its block) for every rank; a block is the owner's parts, concatenated. Read it to the end.

        The next block is on its way while the current one is used.
        """
        ...

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        """Begin to accumulate sums of this length."""
        ...

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The blocks of all ranks, by index; the caller may keep them."""
        ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """parts [size, n], row i for rank i -> [size, n], row i from rank i."""
        ...


def concat_flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def reduce_scatter(ring: RingGroup, parts: Tensor) -> Tensor:
    """parts [size, n], row i for rank i -> [n], the sum of the rows for this rank, added in rank order."""
    return ring.all_to_all(parts).sum(0)


# ---- one rank ------------------------------------------------------------------------------------------------------


class NullRingGroup:
    """See `RingGroup`."""

    name = "alone"
    size, index = 1, 0

    def __init__(self, meter: CommMeter) -> None:
        self.meter = meter

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        yield 0, concat_flat(parts)

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        return _NullAccumulator(torch.zeros(num_elements, dtype=dtype, device=device))

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [concat_flat(parts)]

    def all_to_all(self, parts: Tensor) -> Tensor:
        return parts


class _NullAccumulator:
    """Sums that no other rank adds to; see `RingAccumulator`."""

    def __init__(self, zeros: Tensor) -> None:
        self._zeros = zeros

    def receive(self) -> Tensor:
        raise AssertionError("one rank has no other rank's block")

    def send(self) -> None:
        raise AssertionError("one rank has no neighbour to send to")

    def result(self) -> Tensor:
        return self._zeros


# ---- over messages -------------------------------------------------------------------------------------------------

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


# ---- over a process group ------------------------------------------------------------------------------------------


class ProcessGroupChannel:
    """See `P2PChannel`. Collective among the members."""

    def __init__(self, comm: Communicator, members: Sequence[int], purpose: str, meter: CommMeter) -> None:
        self.meter, self._communicator, self._group = meter, comm, comm.process_group_getter(members, purpose)
        self.name = "NCCL" if comm.device.type == "cuda" else "gloo"
        self.size = len(members)
        self.index = list(members).index(comm.rank)
        neighbours = (members[(self.index + step) % self.size] for step in (1, -1))
        self._right_rank, self._left_rank = (comm.ranks[neighbour] for neighbour in neighbours)

    def send_right_recv_left(self, flat: Tensor, tag: int) -> PendingRecv:
        received = torch.empty_like(flat)
        self.meter.sent_bytes += flat.numel() * flat.element_size()
        operations = [
            dist.P2POp(dist.isend, flat, self._right_rank, group=self._group(), tag=tag),
            dist.P2POp(dist.irecv, received, self._left_rank, group=self._group(), tag=tag),
        ]
        with self._communicator.report_dead_peers():
            works = dist.batch_isend_irecv(operations)

        def wait() -> Tensor:
            with self.meter.timed(), self._communicator.report_dead_peers():
                for work in works:
                    work.wait()
            return received

        return wait

    def all_gather(self, flat: Tensor) -> Tensor:
        gathered = flat.new_empty(self.size, flat.numel())
        self.meter.sent_bytes += (self.size - 1) * flat.numel() * flat.element_size()
        with self.meter.timed(), self._communicator.report_dead_peers():
            all_gather(gathered.view(-1), flat, group=self._group())
        return gathered

    def all_to_all(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        self.meter.sent_bytes += (self.size - 1) * parts[0].numel() * parts.element_size()
        with self.meter.timed(), self._communicator.report_dead_peers():
            dist.all_to_all_single(received, parts, group=self._group())
        return received


# ---- over shared memory --------------------------------------------------------------------------------------------

PUBLISHED, ACCUMULATED, LENGTHS = range(3)  # flags; LENGTHS are two words, the bytes of each published area
BLOCK_AREAS, SUM_AREAS = 0, 2  # areas, two of each


class RingOverSharedMemory:
    """See `RingGroup`."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions) -> None:
        self.regions, self.meter = regions, regions.meter
        self.index, self.size = regions.place.index, regions.place.size
        self._flag_counts = [0, 0]
        self._num_accumulators = 0

    # ---- blocks --------------------------------------------------------------------------------------

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        local_block = self._publish(parts)
        yield self.index, local_block
        for hop in range(1, self.size):
            owner = (self.index - hop) % self.size
            yield owner, self._read_peer(owner, local_block)

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        local_block = self._publish(parts)
        return [self._read_peer(peer, local_block).clone() for peer in range(self.size)]

    def all_gather_uneven(self, row: Tensor) -> Sequence[Tensor]:
        """The rows of all ranks, each of its own length; they may be read until the next exchange but one."""
        self._publish((row,))
        count = self._flag_counts[PUBLISHED]
        area, rows = (count - 1) % 2, []
        for peer in range(self.size):
            self.regions.wait_flag(PUBLISHED, count, peer)
            num_bytes = self._read_length(peer, area)
            rows.append(self.regions.view(peer, BLOCK_AREAS + area, num_bytes // row.element_size(), row.dtype))
        return rows

    def all_to_all(self, parts: Tensor) -> Tensor:
        local_block = self._publish((parts,))
        return torch.stack([self._read_peer(peer, local_block).view_as(parts)[self.index] for peer in range(self.size)])

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        self._num_accumulators += 1
        return _SharedMemoryAccumulator(self, num_elements, dtype)

    def _publish(self, parts: Sequence[Tensor]) -> Tensor:
        """Put this rank's block where all ranks read it; returns it."""
        count, num_elements = self._flag_counts[PUBLISHED], sum(part.numel() for part in parts)
        block = self.regions.view(self.index, BLOCK_AREAS + count % 2, num_elements, parts[0].dtype)
        start = 0
        for part in parts:
            block[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()
        self.regions.words[self.regions.word(self.index, LENGTHS, count % 2)] = block.nbytes
        self._increment_flag(PUBLISHED)
        return block

    def _read_peer(self, peer: int, local_block: Tensor) -> Tensor:
        """A peer's current block; `local_block` is this rank's, of the same length."""
        count = self._flag_counts[PUBLISHED]
        area = (count - 1) % 2
        self.regions.wait_flag(PUBLISHED, count, peer)
        length = self._read_length(peer, area)
        if length != local_block.nbytes:
            ranks = self.regions.place.ranks
            got = f"rank {ranks[peer]} has {length} bytes, rank {ranks[self.index]} {local_block.nbytes}"
            need = "the same attention, of the same sizes, on every rank of a sequence"
            raise DivergenceError(Problem(got, need), where="attention over the context axis")
        return self.regions.view(peer, BLOCK_AREAS + area, local_block.numel(), local_block.dtype)

    # ---- flags ---------------------------------------------------------------------------------------

    def _read_length(self, peer: int, area: int) -> int:
        return self.regions.words[self.regions.word(peer, LENGTHS, area)]

    def _increment_flag(self, flag: int) -> None:
        self._flag_counts[flag] += 1
        self.regions.words[self.regions.word(self.index, flag)] = self._flag_counts[flag]


class _SharedMemoryAccumulator:
    """See `RingAccumulator`."""

    def __init__(self, ring: RingOverSharedMemory, num_elements: int, dtype: torch.dtype) -> None:
        self._ring, self._num_elements, self._dtype = ring, num_elements, dtype
        self._number, self._hop = ring._num_accumulators - 1, 0

    def receive(self) -> Tensor:
        self._hop += 1
        total = self._view((self._ring.index - self._hop) % self._ring.size)
        if self._hop == 1:
            return total.zero_()
        self._wait_for_left(self._hop - 1)
        return total

    def send(self) -> None:
        self._ring._increment_flag(ACCUMULATED)

    def result(self) -> Tensor:
        self._wait_for_left(self._ring.size - 1)
        return self._view(self._ring.index).clone()

    def _wait_for_left(self, hop: int) -> None:
        left = (self._ring.index - 1) % self._ring.size
        self._ring.regions.wait_flag(ACCUMULATED, self._number * (self._ring.size - 1) + hop, left)

    def _view(self, owner: int) -> Tensor:
        return self._ring.regions.view(owner, SUM_AREAS + self._number % 2, self._num_elements, self._dtype)


# ---- which one -----------------------------------------------------------------------------------------------------


def make_ring(
    comm: Communicator, groups: Sequence[Sequence[int]], purpose: str, meter: CommMeter, *, choice: str = "auto"
) -> RingGroup:
    """The ring among the ranks of this rank's group. Collective among `comm`'s ranks, which `groups` partition.

    `groups` are the same on every rank. Raises PlanError if the plan asks for a transport that cannot be had.
    """
    check_transport_device(choice, comm.device.type)
    group = next(each for each in groups if comm.rank in each)
    if all(len(each) == 1 for each in groups):
        return NullRingGroup(meter)
    if comm.device.type == "cpu" and choice in ("auto", "shared"):
        ring, reason = make_shared_memory_ring(comm, groups, meter)
        if ring is not None:
            return ring
        if choice == "shared":
            raise no_shared_memory(reason)
    return RingOverP2P(ProcessGroupChannel(comm, group, purpose, meter))


def make_shared_memory_ring(
    comm: Communicator, groups: Sequence[Sequence[int]], meter: CommMeter
) -> tuple[RingOverSharedMemory | None, str]:
    """The ring of this rank's group if every group is within one host; or None and the reason. Collective."""
    regions, reason = open_regions(comm, groups, meter)
    return (None, reason) if regions is None else (RingOverSharedMemory(regions), "")
