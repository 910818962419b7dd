"""Ranges: [start, stop) of whole numbers, such as the elements of a flat tensor."""

from collections.abc import Iterable


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that do not overlap, sorted; those that touch as one."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and start == result[-1][1]:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return result
