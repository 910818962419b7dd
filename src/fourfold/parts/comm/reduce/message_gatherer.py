"""TODO."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.parts.comm.collectives import ring_bytes
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.async_result import AsyncResult, always_done
from fourfold.words.layout import Change


class MessageGatherer(Protocol):
    """Ranks that gather each other's messages."""

    sent_bytes: float

    def all_gather_async(self, payload: Tensor) -> AsyncResult:
        """Begin to bring the messages [bytes] of all to all; what lands are they, in order."""
        ...


class NullMessageGatherer:
    """A rank whose messages nobody else needs: the others read its sums in memory."""

    sent_bytes = 0.0

    def all_gather_async(self, payload: Tensor) -> AsyncResult:
        return AsyncResult(lambda: [payload], always_done)


class GroupMessageGatherer:
    """Ranks that gather each other's messages; see `coded.Wire`."""

    def __init__(self, ranks: Communicator, members: Sequence[int]) -> None:
        self._communicator, self._group = ranks, ranks.get_group(members, "messages")
        self.size, self.sent_bytes = len(members), 0.0

    def all_gather_async(self, payload: Tensor) -> AsyncResult:
        """Begin to bring the messages [bytes] of all to all; what lands are they, in the order of the members."""
        everyone = torch.empty(self.size * payload.numel(), dtype=payload.dtype, device=payload.device)
        self.sent_bytes += ring_bytes(Change.ALL_GATHER, everyone, self.size)
        with self._communicator.report_dead_peers():
            work = self._group.all_gather(everyone, payload)

        def wait() -> Sequence[Tensor]:
            with self._communicator.report_dead_peers():
                work.wait()
            return everyone.view(self.size, -1).unbind()

        return AsyncResult(wait, work.is_completed)
