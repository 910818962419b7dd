"""Mesh: the devices on four named axes, outermost first: pp × dp × sp × tp.

axis   one of pp (pipeline: layers), dp (data: samples), sp (sequence: tokens), tp (tensor: weights)
rank   global; a place on an axis is an `index`, its length a `size`
peers  the ranks that differ from a rank on the named axes only
Law: for any axes, the groups of peers partition the world.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

Axis = Literal["pp", "dp", "sp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "sp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Pure arithmetic over pp · dp · sp · tp ranks; tp is innermost, so tensor peers are neighbours."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axis_size(axis) for axis in AXES)

    def axis_size(self, axis: Axis) -> int:
        return getattr(self, axis)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The index of `rank` on every axis. Raises IndexError outside the mesh."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is outside a mesh of {self.size} ranks")
        index: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, index[axis] = divmod(rank, self.axis_size(axis))
        return index

    def rank_at(self, coordinates: dict[Axis, int]) -> int:
        """The rank at an index on every axis; axes left out are at 0."""
        rank = 0
        for axis in AXES:
            rank = rank * self.axis_size(axis) + coordinates.get(axis, 0)
        return rank

    def peers(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The ranks that share every index with `rank` except those on `axes`; in order, `rank` among them."""
        here = self.coordinates(rank)
        places = itertools.product(*(range(self.axis_size(axis)) for axis in axes))
        return tuple(sorted(self.rank_at({**here, **dict(zip(axes, place, strict=True))}) for place in places))

    def peer(self, rank: int, axis: Axis, shift: int) -> int:
        """The rank `shift` places further on a ring along `axis`: `mesh.peer(rank, "sp", -1)` is the left neighbour."""
        here = self.coordinates(rank)
        return self.rank_at({**here, axis: (here[axis] + shift) % self.axis_size(axis)})

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of peers along `axes`, by their smallest rank."""
        return tuple(sorted({self.peers(rank, *axes) for rank in range(self.size)}))
