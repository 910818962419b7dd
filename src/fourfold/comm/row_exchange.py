"""Row exchanges: a few numbers of every rank that all ranks need before they can go on, within a forward or a backward.

row    a flat tensor of one rank; the rows of an exchange are of one dtype, and of one length if ranks do the same
place  the first element of a row: where its rank is
Law: all ranks do as many exchanges. Ranks at different places learn this from the exchange; none waits or ends.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.comm.collectives import all_gather_rows
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.ring import RingOverSharedMemory, make_shared_memory_ring
from fourfold.comm.transports import check_transport_device
from fourfold.plan.batch_norm import FIRST_LENGTH


class RowExchange(Protocol):
    """This rank's view of the ranks that exchange rows."""

    ranks: tuple[int, ...]
    """Their global ranks."""

    def all_gather(self, row: Tensor) -> Sequence[Tensor]:
        """The rows of all ranks, in rank order, to be read before the next exchange. Waits.

        If ranks are at different places, what follows the place may be cut or padded.
        """
        ...


class SingleRow:
    """See `RowExchange`; of one rank."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def all_gather(self, row: Tensor) -> Sequence[Tensor]:
        return [row]


class RowsInSharedMemory:
    """See `RowExchange`; of the ranks of one host."""

    def __init__(self, ring: RingOverSharedMemory, ranks: tuple[int, ...]) -> None:
        self.ranks, self._ring = ranks, ring

    def all_gather(self, row: Tensor) -> Sequence[Tensor]:
        return self._ring.all_gather_uneven(row)


class RowsOverGroup:
    """See `RowExchange`; over gloo or NCCL. `first_length`: of what is sent first; shorter rows are padded."""

    def __init__(self, comm: Communicator, purpose: str, meter: CommMeter, first_length: int) -> None:
        self._first_length = first_length
        self.ranks, self._comm, self._meter = comm.ranks, comm, meter
        self._group = comm.get_group(range(comm.size), purpose)

    def all_gather(self, row: Tensor) -> Sequence[Tensor]:
        length, first_length = row.numel(), self._first_length
        first = self._all_gather(F.pad(row[:first_length], (0, max(0, first_length - length))))
        # Before the rest is sent, whose length may differ at another place.
        if length <= first_length or bool((first[:, 0] != row[0]).any()):
            return first[:, :length].unbind()
        return torch.cat([first, self._all_gather(row[first_length:])], 1).unbind()

    def _all_gather(self, row: Tensor) -> Tensor:
        """[n] -> [size, n]"""
        size = len(self.ranks)
        self._meter.sent_bytes += (size - 1) * row.nbytes
        with self._meter.timed(), self._comm.report_dead_peers():
            return torch.stack(list(all_gather_rows(self._group, row, size=size)))


def make_row_exchange(
    comm: Communicator,
    purpose: str,
    meter: CommMeter,
    *,
    choice: str = "auto",
    first_length: int = FIRST_LENGTH,
) -> RowExchange:
    """The exchange of all ranks of `comm`: in shared memory if they are on one host and `choice` allows it. Collective.

    choice        the plan's transport
    first_length  at least this many elements are sent, where rows travel

    Raises PlanError if this kind of device cannot have the transport.
    """
    check_transport_device(choice, comm.device.type)
    if comm.size == 1:
        return SingleRow(comm.ranks)
    if comm.device.type == "cpu" and choice in ("auto", "shared"):
        ring, _ = make_shared_memory_ring(comm, [range(comm.size)], meter)
        if ring is not None:
            return RowsInSharedMemory(ring, comm.ranks)
    return RowsOverGroup(comm, purpose, meter, first_length)
