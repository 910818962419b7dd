"""Ranges: [start, stop) of whole numbers, such as the elements of a flat tensor; boxes: ranges in every dim.

Law: a box names elements of the global tensor, the same whatever the mesh.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

# ---- box -----------------------------------------------------------------------------------------------------------


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


# ---- ranges --------------------------------------------------------------------------------------------------------


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that do not overlap, sorted; those that touch as one."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and start == result[-1][1]:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return result


def rest_of_range(start: int, stop: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is left of [start, stop) without other ranges, which are sorted and do not overlap."""
    for first, last in taken:
        first, last = max(first, start), min(last, stop)
        if first >= last:
            continue
        if start < first:
            yield start, first
        start = last
    if start < stop:
        yield start, stop
