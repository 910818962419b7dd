"""Links between ranks that are threads: messages by queues, or real shared memory."""

import queue
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.comm.links import NullRingGroup, PendingRecv, RingGroup, RingOverP2P
from fourfold.parts.sequence import SequenceGroup, connect_sequence
from fourfold.testing.threads import TIME_LIMIT_SECONDS, ThreadRanks
from fourfold.words.spans import SILENT

GATHER, SWAP = "gather", "swap"


class ThreadWire:
    """See `links.Wire`. `sent` counts the elements that this rank has sent."""

    name = "threads"

    def __init__(self, ranks: ThreadRanks, members: Sequence[int], boxes: dict[Any, queue.Queue[Tensor]]) -> None:
        self.size, self.index, self._members, self._boxes = len(members), members.index(ranks.rank), members, boxes
        self.sent_bytes, self.waiting_seconds, self.recorder = 0.0, 0.0, SILENT
        self.sent = 0

    def shift(self, flat: Tensor, lane: int) -> PendingRecv:
        self._put(flat, (self.index + 1) % self.size, lane)
        return lambda: self._get((self.index - 1) % self.size, lane)

    def gather(self, flat: Tensor) -> Tensor:
        return self._exchange([flat] * self.size, GATHER)

    def swap(self, parts: Tensor) -> Tensor:
        return self._exchange(list(parts), SWAP)

    def _exchange(self, parts: Sequence[Tensor], lane: str) -> Tensor:
        for peer, part in enumerate(parts):
            if peer != self.index:
                self._put(part, peer, lane)
        own = parts[self.index].clone()
        return torch.stack([own if peer == self.index else self._get(peer, lane) for peer in range(self.size)])

    def _put(self, flat: Tensor, peer: int, lane: int | str) -> None:
        self.sent += flat.numel()
        self.sent_bytes += flat.nbytes
        self._box(self.index, peer, lane).put(flat.clone())

    def _get(self, peer: int, lane: int | str) -> Tensor:
        return self._box(peer, self.index, lane).get(timeout=TIME_LIMIT_SECONDS)

    def _box(self, source: int, target: int, lane: int | str) -> queue.Queue[Tensor]:
        return self._boxes.setdefault((self._members[source], self._members[target], lane), queue.Queue())


def messages(ranks: ThreadRanks, groups: Sequence[Sequence[int]]) -> RingGroup:
    """The link of a thread's group, by messages. Collective."""
    boxes = ranks.swap({})[0]
    mine = next(group for group in groups if ranks.rank in group)
    return RingOverP2P(ThreadWire(ranks, mine, boxes)) if len(mine) > 1 else NullRingGroup()


def axis(ranks: ThreadRanks, ring: str = "zigzag", ulysses: int = 1, *, by: str = "messages") -> SequenceGroup:
    """The axis of a thread; all threads keep tokens of one sequence. `by`: messages, or shared memory. Collective."""
    everyone = range(ranks.size)
    if by == "shared":
        return connect_sequence(ranks, [everyone], ring=ring, ulysses=ulysses, transport="shared")
    places = [everyone[first::ulysses] for first in range(ulysses)]
    neighbours = [everyone[start : start + ulysses] for start in range(0, ranks.size, ulysses)]
    return SequenceGroup(messages(ranks, places), messages(ranks, neighbours), ring)
