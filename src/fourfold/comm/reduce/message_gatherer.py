"""Message gatherers: all-gathers of codecs' messages."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.comm.collectives import ring_bytes
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.sharded_collectives import AsyncResult, always_done
from fourfold.words.layout import Change


class MessageGatherer(Protocol):
    """All-gathers the messages of some ranks: one of each host if hosts share memory, else all."""

    def all_gather_async(self, payload: Tensor) -> AsyncResult:
        """Begin to gather the members' messages [elements]; the result is one message per member, in rank order."""
        ...


class NullMessageGatherer:
    """Where all ranks share memory, or there is one: the result is this rank's own message alone.

    Ranks then sum what they have decoded in shared memory.
    """

    def all_gather_async(self, payload: Tensor) -> AsyncResult:
        return AsyncResult(lambda: [payload], always_done)


class GroupMessageGatherer:
    """The ranks of a process group; see `MessageGatherer`."""

    def __init__(self, comm: Communicator, members: Sequence[int], meter: CommMeter) -> None:
        self._communicator, self._group = comm, comm.get_group(members, "messages")
        self.size, self._meter = len(members), meter

    def all_gather_async(self, payload: Tensor) -> AsyncResult:
        gathered = torch.empty(self.size * payload.numel(), dtype=payload.dtype, device=payload.device)
        self._meter.sent_bytes += ring_bytes(Change.ALL_GATHER, gathered, self.size)
        with self._communicator.report_dead_peers():
            work = self._group.all_gather(gathered, payload)

        def wait() -> Sequence[Tensor]:
            with self._communicator.report_dead_peers():
                work.wait()
            return gathered.view(self.size, -1).unbind()

        return AsyncResult(wait, work.is_completed)
