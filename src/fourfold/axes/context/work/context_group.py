"""Context groups: the ranks that hold the tokens of the same sequences.

cp_size = ring size × ulysses. The `ulysses` neighbours first exchange tokens for heads; then keys and values go round
the ring. `axes/context/rules/layout.py` says which tokens each rank keeps.
Law: the index on the axis is ring index · ulysses + ulysses index.
"""

from dataclasses import dataclass

from fourfold.axes.context.rules.layout import ContextSpec, TokenRanges, ulysses_problem
from fourfold.comm.channel import Channel, make_channel
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.words.errors import PlanError


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that hold one sequence, seen from one of them. `ring` is one of `RINGS` of `rules/layout.py`."""

    ring_group: Channel
    """The ranks among which keys and values go round."""
    ulysses_group: Channel
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
    def groups(self) -> tuple[Channel, Channel]:
        return self.ring_group, self.ulysses_group

    @property
    def spec(self) -> ContextSpec:
        """Which tokens each index holds."""
        return ContextSpec(self.size, self.ring, self.ulysses)

    def local_token_ranges(self, length: int) -> TokenRanges:
        """The ranges of a sequence of this length that this rank keeps, in local order. Raises PlanError."""
        return self.spec.token_ranges(length)[self.index]


def connect_context(
    comm: Communicator, meter: CommMeter, *, ring: str = "zigzag", ulysses: int = 1, transport: str = "auto"
) -> ContextGroup:
    """This rank's context group. Collective among the ranks of `comm`: those of one sequence (`world.along("cp")`).

    `transport` is the plan's. Raises PlanError.
    """
    if problem := ulysses_problem(comm.size, ulysses):
        raise PlanError(problem, where="the plan")
    ranks = range(comm.size)
    strided = [ranks[first::ulysses] for first in range(ulysses)]
    ring_group = make_channel(comm, "ring", meter, groups=strided, choice=transport)
    neighbours = [ranks[start : start + ulysses] for start in range(0, comm.size, ulysses)]
    ulysses_group = make_channel(comm, "heads", meter, groups=neighbours, choice=transport)
    return ContextGroup(ring_group, ulysses_group, ring)
