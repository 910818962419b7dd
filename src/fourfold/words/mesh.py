"""Mesh: the devices on four named axes, outermost first: pp × dp × cp × tp.

axis   one of pp (pipeline: layers), dp (data: samples), cp (context: tokens), tp (tensor: weights)
rank   always global; the position of a rank on one axis is its `index`, the length of an axis its `size`
peers  the ranks that have the same index as a rank on all but the named axes
Law: for any axes, the groups of peers partition the world.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Arithmetic over pp · dp · cp · tp ranks. tp is innermost, so tensor-parallel peers have consecutive ranks."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
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
        """The rank with these indices; an axis left out has index 0."""
        rank = 0
        for axis in AXES:
            rank = rank * self.axis_size(axis) + coordinates.get(axis, 0)
        return rank

    def peers(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The ranks that have the same index as `rank` on all axes but `axes`: in rank order, `rank` included."""
        here = self.coordinates(rank)
        combinations = itertools.product(*(range(self.axis_size(axis)) for axis in axes))
        return tuple(sorted(self.rank_at({**here, **dict(zip(axes, each, strict=True))}) for each in combinations))

    def peer(self, rank: int, axis: Axis, shift: int) -> int:
        """The rank `shift` steps further on the ring along `axis`: with cp and -1, the left neighbour."""
        here = self.coordinates(rank)
        return self.rank_at({**here, axis: (here[axis] + shift) % self.axis_size(axis)})

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of peers along `axes`, ordered by their smallest rank."""
        return _groups(self, axes)


@functools.lru_cache(maxsize=64)  # of a thousand ranks they take milliseconds, and a plan is asked for them many times
def _groups(mesh: Mesh, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        groups.setdefault(tuple(here[axis] for axis in AXES if axis not in axes), []).append(rank)
    return tuple(map(tuple, groups.values()))
