"""Ring groups: ranks that exchange blocks: the ranks of a ring, or those that exchange heads.

block        a flat tensor of the same length and dtype on every rank; here K and V of a rank's tokens, in one message
iteration    `iterate_blocks`: this rank's own block, then its left neighbour's, and so on round the ring
accumulator  sums that end at their owner: each rank adds its part for the block that it looks at, its own last
Law: all ranks of a group do the same things with it in the same order. A block is read before the next one is asked
for, and never written.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.parts.comm.meter import CommMeter


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
