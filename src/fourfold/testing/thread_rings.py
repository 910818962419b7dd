"""Rings between ranks that are threads: messages by queues, or real shared memory."""

import queue
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring import NullRingGroup, PendingRecv, RingGroup, RingOverP2P
from fourfold.parts.sequence.sequence_group import SequenceGroup, connect_sequence
from fourfold.testing.threads import TIME_LIMIT_SECONDS, ThreadCommunicator

GATHER_TAG, ALL_TO_ALL_TAG = "gather", "swap"


class ThreadChannel:
    """See `P2PChannel`. `num_sent_elements` counts what this rank has sent."""

    name = "threads"

    def __init__(
        self,
        comm: ThreadCommunicator,
        members: Sequence[int],
        queues: dict[Any, queue.Queue[Tensor]],
        meter: CommMeter,
    ) -> None:
        self.size, self.index, self._members, self._queues = len(members), members.index(comm.rank), members, queues
        self.meter, self.num_sent_elements = meter, 0

    def send_right_recv_left(self, flat: Tensor, tag: int) -> PendingRecv:
        self._send(flat, (self.index + 1) % self.size, tag)
        return lambda: self._recv((self.index - 1) % self.size, tag)

    def all_gather(self, flat: Tensor) -> Tensor:
        return self._all_to_all([flat] * self.size, GATHER_TAG)

    def all_to_all(self, parts: Tensor) -> Tensor:
        return self._all_to_all(list(parts), ALL_TO_ALL_TAG)

    def _all_to_all(self, parts: Sequence[Tensor], tag: str) -> Tensor:
        for peer, part in enumerate(parts):
            if peer != self.index:
                self._send(part, peer, tag)
        local = parts[self.index].clone()
        return torch.stack([local if peer == self.index else self._recv(peer, tag) for peer in range(self.size)])

    def _send(self, flat: Tensor, peer: int, tag: int | str) -> None:
        self.num_sent_elements += flat.numel()
        self.meter.sent_bytes += flat.nbytes
        self._queue(self.index, peer, tag).put(flat.clone())

    def _recv(self, peer: int, tag: int | str) -> Tensor:
        return self._queue(peer, self.index, tag).get(timeout=TIME_LIMIT_SECONDS)

    def _queue(self, source: int, target: int, tag: int | str) -> queue.Queue[Tensor]:
        return self._queues.setdefault((self._members[source], self._members[target], tag), queue.Queue())


def make_p2p_ring(comm: ThreadCommunicator, groups: Sequence[Sequence[int]], meter: CommMeter) -> RingGroup:
    """The ring of a thread's group, by messages. Collective."""
    queues = comm.all_gather_object({})[0]
    group = next(each for each in groups if comm.rank in each)
    return RingOverP2P(ThreadChannel(comm, group, queues, meter)) if len(group) > 1 else NullRingGroup(meter)


def make_axis(
    comm: ThreadCommunicator, ring: str = "zigzag", ulysses: int = 1, *, transport: str = "messages"
) -> SequenceGroup:
    """The sequence axis of a thread; all threads hold tokens of one sequence. Collective.

    `transport`: "messages" or "shared" (memory).
    """
    ranks, meter = range(comm.size), CommMeter()
    if transport == "shared":
        return connect_sequence(comm, meter, ring=ring, ulysses=ulysses, transport="shared")
    ring_groups = [ranks[first::ulysses] for first in range(ulysses)]
    head_groups = [ranks[start : start + ulysses] for start in range(0, comm.size, ulysses)]
    return SequenceGroup(make_p2p_ring(comm, ring_groups, meter), make_p2p_ring(comm, head_groups, meter), ring)
