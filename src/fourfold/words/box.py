"""Box: a part of a tensor, an offset and a length for every dim.

Law: a box names elements of the global tensor, the same whatever the mesh.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self


class Box(NamedTuple):
    """A part of a tensor: an offset and a length for every dim."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.lengths)
