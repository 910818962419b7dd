"""Channels: a few ranks that pass each other flat tensors, over shared memory, or messages over gloo or NCCL.

block        a flat tensor of the same length and dtype on every rank; in a ring K and V of a rank's tokens
iteration    `iterate_blocks`: this rank's own block, then its left neighbour's, and so on round the ring
accumulator  sums that end at their owner: each rank adds its part for the block that it looks at, its own last
row          what a rank says to all others: its first element says where the rank is. Rows may differ in length
tag          separates blocks from sums; messages with the same tag arrive in order
publish      put a block where the other ranks read it, in one of two areas alternately
sum          what the other ranks have added up for a rank, in one of two areas of that rank's region alternately
Law: the ranks of a channel choose the same transport, from what all of them have said of themselves. They do the same
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
import torch.nn.functional as F
from torch import Tensor

from fourfold.comm.collectives import Group
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import ONE_RANK, GroupPlace, SharedRegions, choose_regions
from fourfold.words.errors import DivergenceError, Problem
from fourfold.words.trace_events import RING_SPAN

# ---- what a channel does -------------------------------------------------------------------------------------------


class Accumulator(Protocol):
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


class Channel(Protocol):
    """This rank's view of the ranks."""

    name: str
    ranks: tuple[int, ...]
    """Their global ranks."""
    size: int
    index: int
    meter: CommMeter
    """That of this rank: it counts and records what is sent and waited for."""

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yields (owner, its block) for every rank; a block is the owner's parts, concatenated. Read it to the end.

        The next block is on its way while the current one is used.
        """
        ...

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Accumulator:
        """Begin to accumulate sums of this length."""
        ...

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The blocks of all ranks, by index; the caller may keep them."""
        ...

    def all_gather_rows(self, row: Tensor) -> Sequence[Tensor]:
        """The rows of all ranks, in rank order, to be read before the next exchange. Waits.

        If ranks are at different places, what follows the place may be cut or padded: they learn it, and none waits.
        """
        ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """parts [size, n], row i for rank i -> [size, n], row i from rank i."""
        ...


def concat_flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def reduce_scatter(channel: Channel, parts: Tensor) -> Tensor:
    """parts [size, n], row i for rank i -> [n], the sum of the rows for this rank, added in rank order."""
    return channel.all_to_all(parts).sum(0)


# ---- over messages -------------------------------------------------------------------------------------------------

BLOCK_TAG, SUM_TAG = range(2)


class MessageChannel:
    """See `Channel`. Without a group there is one rank, which sends nothing.

    first_length  how much of a row is sent first; shorter rows are padded
    """

    def __init__(
        self,
        meter: CommMeter,
        group: Group | None = None,
        place: GroupPlace = ONE_RANK,
        *,
        name: str = "alone",
        first_length: int = 1,
    ) -> None:
        self.name, self.ranks, self.size, self.index = name, place.ranks, place.size, place.index
        self.meter, self._group, self._first_length = meter, group, first_length

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        block = concat_flat(parts)
        for hop in range(self.size):
            wait = self.shift(block, BLOCK_TAG) if hop < self.size - 1 else None
            yield (self.index - hop) % self.size, block
            if wait is not None:
                block = wait()

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Accumulator:
        return _MessageAccumulator(self, torch.zeros(num_elements, dtype=dtype, device=device))

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._gather(concat_flat(parts)).unbind()

    def all_gather_rows(self, row: Tensor) -> Sequence[Tensor]:
        if self._group is None:
            return [row]
        length, first_length = row.numel(), self._first_length
        first = self._gather(F.pad(row[:first_length], (0, max(0, first_length - length))))
        # Before the rest is sent, whose length may differ at another place.
        if length <= first_length or bool((first[:, 0] != row[0]).any()):
            return first[:, :length].unbind()
        return torch.cat([first, self._gather(row[first_length:])], 1).unbind()

    def all_to_all(self, parts: Tensor) -> Tensor:
        if self._group is None:
            return parts
        self.meter.sent_bytes += (self.size - 1) * parts[0].nbytes
        received = torch.empty_like(parts)
        with self.meter.timed():
            self._group.all_to_all(received.view(-1), parts.view(-1)).wait()
        return received

    def shift(self, flat: Tensor, tag: int) -> Callable[[], Tensor]:
        """Begin to send to the right neighbour. Returns the wait for what the left neighbour sends."""
        assert self._group is not None
        self.meter.sent_bytes += flat.nbytes
        end_span, work = self.meter.recorder.sending(RING_SPAN), self._group.shift(flat, tag)

        def wait() -> Tensor:
            with self.meter.timed():
                received = work.wait()
            end_span()
            return received

        return wait

    def _gather(self, flat: Tensor) -> Tensor:
        """[n] -> [size, n]"""
        if self._group is None:
            return flat[None]
        gathered = flat.new_empty(self.size, flat.numel())
        self.meter.sent_bytes += (self.size - 1) * flat.nbytes
        with self.meter.timed():
            self._group.all_gather(gathered.view(-1), flat).wait()
        return gathered


class _MessageAccumulator:
    """See `Accumulator`. `zeros`: the first sum, which this rank passes on."""

    def __init__(self, channel: MessageChannel, zeros: Tensor) -> None:
        self._channel, self._sum = channel, zeros
        self._wait: Callable[[], Tensor] | None = None

    def receive(self) -> Tensor:
        if self._wait is not None:
            self._sum = self._wait()
        return self._sum

    def send(self) -> None:
        self._wait = self._channel.shift(self._sum, SUM_TAG)

    def result(self) -> Tensor:
        return self.receive()


# ---- over shared memory --------------------------------------------------------------------------------------------

PUBLISHED, ACCUMULATED, LENGTHS = range(3)  # flags; LENGTHS are two words, the bytes of each published area
BLOCK_AREAS, SUM_AREAS = 0, 2  # areas, two of each


class MemoryChannel:
    """See `Channel`."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions) -> None:
        self.regions, self.meter, self.ranks = regions, regions.meter, regions.place.ranks
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

    def all_gather_rows(self, row: Tensor) -> Sequence[Tensor]:
        self._publish((row,))
        rows = []
        for peer in range(self.size):
            area, num_bytes = self._wait_published(peer)
            rows.append(self.regions.view(peer, area, num_bytes // row.element_size(), row.dtype))
        return rows

    def all_to_all(self, parts: Tensor) -> Tensor:
        local_block = self._publish((parts,))
        return torch.stack([self._read_peer(peer, local_block).view_as(parts)[self.index] for peer in range(self.size)])

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Accumulator:
        self._num_accumulators += 1
        return _MemoryAccumulator(self, num_elements, dtype)

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

    def _wait_published(self, peer: int) -> tuple[int, int]:
        """Wait for a peer's current block; returns its area, and its bytes."""
        count = self._flag_counts[PUBLISHED]
        area = (count - 1) % 2
        self.regions.wait_flag(PUBLISHED, count, peer)
        return BLOCK_AREAS + area, self.regions.words[self.regions.word(peer, LENGTHS, area)]

    def _read_peer(self, peer: int, local_block: Tensor) -> Tensor:
        """A peer's current block; `local_block` is this rank's, of the same length."""
        area, length = self._wait_published(peer)
        if length != local_block.nbytes:
            got = f"rank {self.ranks[peer]} has {length} bytes, rank {self.ranks[self.index]} {local_block.nbytes}"
            need = "the same attention, of the same sizes, on every rank of a sequence"
            raise DivergenceError(Problem(got, need), where="attention over the context axis")
        return self.regions.view(peer, area, local_block.numel(), local_block.dtype)

    def _increment_flag(self, flag: int) -> None:
        self._flag_counts[flag] += 1
        self.regions.words[self.regions.word(self.index, flag)] = self._flag_counts[flag]


class _MemoryAccumulator:
    """See `Accumulator`."""

    def __init__(self, channel: MemoryChannel, num_elements: int, dtype: torch.dtype) -> None:
        self._channel, self._num_elements, self._dtype = channel, num_elements, dtype
        self._number, self._hop = channel._num_accumulators - 1, 0

    def receive(self) -> Tensor:
        self._hop += 1
        total = self._view((self._channel.index - self._hop) % self._channel.size)
        if self._hop == 1:
            return total.zero_()
        self._wait_for_left(self._hop - 1)
        return total

    def send(self) -> None:
        self._channel._increment_flag(ACCUMULATED)

    def result(self) -> Tensor:
        self._wait_for_left(self._channel.size - 1)
        return self._view(self._channel.index).clone()

    def _wait_for_left(self, hop: int) -> None:
        channel = self._channel
        count = self._number * (channel.size - 1) + hop
        channel.regions.wait_flag(ACCUMULATED, count, (channel.index - 1) % channel.size)

    def _view(self, owner: int) -> Tensor:
        return self._channel.regions.view(owner, SUM_AREAS + self._number % 2, self._num_elements, self._dtype)


# ---- which one -----------------------------------------------------------------------------------------------------


def make_channel(
    comm: Communicator,
    purpose: str,
    meter: CommMeter,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    choice: str = "auto",
    may_cross_hosts: bool = False,
    first_length: int = 1,
) -> Channel:
    """The channel among the ranks of this rank's group. Collective among `comm`'s ranks.

    groups           partition `comm`'s ranks, the same on every rank; None: all ranks are one
    choice           the plan's transport
    may_cross_hosts  ranks on several hosts exchange messages, though the plan asks for shared memory inside hosts
    first_length     how much of a row is sent first, where it is sent

    Raises PlanError if the plan asks for a transport that cannot be had.
    """
    groups = groups or [range(comm.size)]
    regions = choose_regions(comm, groups, meter, choice=choice, may_cross_hosts=may_cross_hosts)
    if regions is not None:
        return MemoryChannel(regions)
    place, members = GroupPlace.of(comm, groups)
    if place.size == 1:
        return MessageChannel(meter, place=place)
    group = comm.get_group(members, purpose)
    return MessageChannel(meter, group, place, name=comm.backend, first_length=first_length)
