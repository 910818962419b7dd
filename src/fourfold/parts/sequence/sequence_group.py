"""Sequence groups: the ranks that hold the tokens of the same sequences.

sp_size = ring size × ulysses. The `ulysses` neighbours first exchange tokens for heads; then keys and values go round
the ring. `plan/sequence.py` says which tokens each rank keeps.
Law: the index on the axis is ring index · ulysses + ulysses index.
"""

from dataclasses import dataclass

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.parts.comm.rings import make_ring
from fourfold.plan.sequence import TokenRanges, ring_size, token_ranges


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that hold one sequence, seen from one of them. `ring` is one of `plan.sequence.RINGS`."""

    ring_group: RingGroup
    """The ranks among which keys and values go round."""
    ulysses_group: RingGroup
    """The neighbours that exchange tokens for heads."""
    ring: str = "zigzag"

    @property
    def size(self) -> int:
        return self.ring_group.size * self.ulysses_group.size

    @property
    def index(self) -> int:
        return self.ring_group.index * self.ulysses_group.size + self.ulysses_group.index

    @property
    def ulysses(self) -> int:
        return self.ulysses_group.size

    @property
    def groups(self) -> tuple[RingGroup, RingGroup]:
        return self.ring_group, self.ulysses_group

    def token_ranges_by_index(self, length: int) -> tuple[TokenRanges, ...]:
        """The ranges of a sequence of this length that each index keeps, in its local order. Raises PlanError."""
        return token_ranges(length, self.size, self.ring, self.ulysses)

    def local_token_ranges(self, length: int) -> TokenRanges:
        """The ranges that this rank keeps."""
        return self.token_ranges_by_index(length)[self.index]


def connect_sequence(
    comm: Communicator, meter: CommMeter, *, ring: str = "zigzag", ulysses: int = 1, transport: str = "by-host"
) -> SequenceGroup:
    """This rank's sequence group. Collective among the ranks of `comm`: those of one sequence (`world.along("sp")`).

    `transport` is the plan's. Raises PlanError.
    """
    ring_size(comm.size, ulysses)
    ranks = range(comm.size)
    ring_group = make_ring(comm, [ranks[first::ulysses] for first in range(ulysses)], "ring", meter, choice=transport)
    neighbours = [ranks[start : start + ulysses] for start in range(0, comm.size, ulysses)]
    return SequenceGroup(ring_group, make_ring(comm, neighbours, "heads", meter, choice=transport), ring)
