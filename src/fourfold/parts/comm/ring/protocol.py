"""Links: ranks that show each other blocks: the places of a ring, or those that exchange heads.

block   a flat of the same length and dtype on every rank; here K and V of a rank's tokens, in one message
visit   the blocks of all, one after the other: one's own, then that of the place before, and so on
carry   sums that end at their owner: each rank adds its part for the owner that it is visited by, its own last
wire    what messages are sent by: a process group, or queues of threads
Law: all ranks of a link do the same things with it in the same order. What a visit shows is to be read before the
next one is asked for, and never written.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.words.trace_events import Recorder


class RingAccumulator(Protocol):
    """Sums on their way to their owners; `take` and `give` by turns, size − 1 times, then `own`."""

    def receive(self) -> Tensor:
        """What the ranks before have added up for the owner of the block visited now; zeros if there are none."""
        ...

    def send(self) -> None:
        """This rank has added its part to what it took."""
        ...

    def result(self) -> Tensor:
        """What all others have added up for this rank."""
        ...


class RingGroup(Protocol):
    """This rank's view of the ranks of a link."""

    name: str
    size: int
    index: int

    @property
    def sent_bytes(self) -> float:
        """Given to process groups, since the start."""
        ...

    @property
    def waiting_seconds(self) -> float:
        """Spent waiting for others, since the start."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Told of waits."""
        ...

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None: ...

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(owner, its block: its parts, one after the other), for all. To be read to the end.

        The next one is on its way while one is looked at.
        """
        ...

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        """Begin sums of this length."""
        ...

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The blocks of all, by index; this rank's to keep."""
        ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """parts [size, n], one for each rank -> [size, n], what each rank had for this one."""
        ...


def concat_flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def reduce_scatter(ring: RingGroup, parts: Tensor) -> Tensor:
    """parts [size, n], this rank's addends for each -> [n], the sum of all ranks' for this one, in rank order."""
    return ring.all_to_all(parts).sum(0)
