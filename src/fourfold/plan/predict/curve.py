"""Curves: seconds by size, as measured at a few sizes.

Law: what is larger never costs less, and nothing costs less than nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self


class Curve(NamedTuple):
    """Seconds at sizes, in order. Between them it is linear; beyond the ends, the slope beside them goes on."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Self:
        """The curve nearest to measured points that never falls; points of one size count with their mean."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(size, []).append(seconds)
        sizes = sorted(by_size)
        return cls(tuple(sizes), tuple(_never_falling([sum(by_size[s]) / len(by_size[s]) for s in sizes])))

    def at(self, size: float) -> float:
        """Seconds at a size. A single point is scaled."""
        if len(self.sizes) == 1:
            return self.seconds[0] * size / self.sizes[0]
        high = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        left, right = self.sizes[high - 1], self.sizes[high]
        low_seconds, slope = self.seconds[high - 1], (self.seconds[high] - self.seconds[high - 1]) / (right - left)
        return max(0.0, low_seconds + slope * (size - left))

    def times(self, factor: float) -> "Curve":
        """The same sizes, with every second multiplied."""
        return Curve(self.sizes, tuple(second * factor for second in self.seconds))


def _never_falling(values: Sequence[float]) -> list[float]:
    """The never-falling sequence with the least squared distance: neighbours that fall share their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (second, n), (first, m) = blocks.pop(), blocks.pop()
            blocks.append(((first * m + second * n) / (m + n), m + n))
    return [mean for mean, count in blocks for _ in range(count)]
