"""Checkpoint boxes: which part of a tensor a file of a checkpoint holds.

box    a rectangular part of a tensor: an offset and a length for every dim
part   a box, and a range [start, stop) of its elements in row-major order: what a rank holds of a tensor
       (a shard of an optimizer state is a range of the whole tensor; where columns are split too, of a box of columns)
block  a box of consecutive elements of a part; a part in n dims has at most 2n − 1 blocks
Law: the stored parts of a tensor tile it.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fourfold.words.ranges import Box, join_ranges

FILE_NAME_PATTERN = re.compile(r"rank-[0-9]{3,6}\.safetensors")
# By the dtype names of the safetensors format.
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
# Bounds the work on a hostile manifest. The boxes of a grid are separated in as many rounds as it has dims.
MAX_CUTS, MAX_COMPARED_BOXES = 32, 256

Shape = tuple[int, ...]


class Part(NamedTuple):
    """The elements [start, stop) of a box in row-major order."""

    box: Box
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def is_box(self) -> bool:
        """Whether it is all of its box."""
        return (self.start, self.stop) == (0, self.box.num_elements)


class Block(NamedTuple):
    """A box of consecutive elements of a part; `start` is its first element, counted from the part's first one."""

    start: int
    box: Box


class Overlap(NamedTuple):
    """What a block of one part and a block of another have in common."""

    first: Block
    second: Block
    common: Box


def shard_file_name(rank: int) -> str:
    return f"rank-{rank:03d}.safetensors"


def whole(shape: Shape) -> Part:
    """All elements of a tensor."""
    return Part(Box((0,) * len(shape), shape), 0, math.prod(shape))


def flattened(part: Part) -> Part:
    """The same elements of its box viewed in one dim."""
    return Part(Box((0,), (part.box.num_elements,)), part.start, part.stop)


def blocks(part: Part) -> list[Block]:
    """The blocks of a part, in order."""
    found = []
    for start, box in _range_boxes(part.box.lengths, part.start, part.stop):
        offsets = tuple(a + b for a, b in zip(box.offsets, part.box.offsets, strict=True))
        found.append(Block(start - part.start, Box(offsets, box.lengths)))
    return found


def _range_boxes(lengths: Shape, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes that elements [start, stop) of a tensor consist of, each with its first element."""
    if start >= stop:
        return
    if len(lengths) < 2:
        yield start, Box((start,), (stop - start,)) if lengths else Box((), ())
        return
    row = math.prod(lengths[1:])
    first, last = -(-start // row), stop // row  # the whole rows [first, last)
    if first > last:
        yield from _row_boxes(lengths, last, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _row_boxes(lengths, first - 1, start % row, row)
    if first < last:
        yield first * row, Box((first, *(0 for _ in lengths[1:])), (last - first, *lengths[1:]))
    if stop % row:
        yield from _row_boxes(lengths, last, 0, stop % row)


def _row_boxes(lengths: Shape, index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes of elements [start, stop) of one row."""
    row = math.prod(lengths[1:])
    for first, box in _range_boxes(lengths[1:], start, stop):
        yield index * row + first, Box((index, *box.offsets), (1, *box.lengths))


def overlaps(first: Part, second: Part) -> Iterator[Overlap]:
    """What two parts of one tensor have in common, as boxes."""
    if intersection(first.box, second.box) is None:
        return
    for a, b in itertools.product(blocks(first), blocks(second)):
        if (common := intersection(a.box, b.box)) is not None:
            yield Overlap(a, b, common)


def intersection(a: Box, b: Box) -> Box | None:
    """The part that two boxes of one tensor have in common; None if it is empty."""
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True))
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def relative_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that select `box` from a tensor that holds `outer`."""
    return tuple(slice(x - y, x - y + n) for x, y, n in zip(box.offsets, outer.offsets, box.lengths, strict=True))


def is_inside(part: Part, shape: Sequence[int]) -> bool:
    """Whether a part lies within a tensor of this shape."""
    (offsets, lengths), start, stop = part
    if not len(offsets) == len(lengths) == len(shape):
        return False
    if not all(x >= 0 and n >= 0 and x + n <= size for x, n, size in zip(offsets, lengths, shape, strict=True)):
        return False
    return 0 <= start <= stop <= math.prod(lengths)


def is_tiling(parts: Iterable[Part], shape: Sequence[int]) -> bool:
    """Whether parts that are inside a tensor of this shape cover it without overlap.

    Takes time in proportion to their number. Many boxes that no planes separate are refused; no mesh has them.
    """
    ranges_by_box: dict[Box, list[tuple[int, int]]] = {}
    num_elements = 0
    for box, start, stop in parts:
        num_elements += stop - start
        if start < stop:
            ranges_by_box.setdefault(box, []).append((start, stop))
    if num_elements != math.prod(shape):
        return False
    found: list[Box] = []
    for box, ranges in ranges_by_box.items():
        found += [block.box for start, stop in join_ranges(ranges) for block in blocks(Part(box, start, stop))]
    return _are_disjoint(found)


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes, none of them empty, have an element in common."""
    groups = [boxes]
    for _ in range(MAX_CUTS):
        groups = [group for each in groups for group in _cut_apart(each) if len(group) > 1]
        if not groups:
            return True
    return all(
        len(each) <= MAX_COMPARED_BOXES and not any(intersection(a, b) for a, b in itertools.combinations(each, 2))
        for each in groups
    )


def _cut_apart(boxes: Sequence[Box]) -> list[Sequence[Box]]:
    """Groups of boxes between which a plane of one dim passes without cutting a box; one group if there is no plane."""
    for dim in range(len(boxes[0].offsets)) if boxes else ():
        groups: list[Sequence[Box]] = []
        group: list[Box] = []
        end = 0
        for box in sorted(boxes, key=lambda each: each.offsets[dim]):
            if group and box.offsets[dim] >= end:
                groups.append(group)
                group = []
            group.append(box)
            end = max(end, box.offsets[dim] + box.lengths[dim])
        if groups:
            return [*groups, group]
    return [boxes]


def divide_writing(tensors: Sequence[tuple[int, int]], index: int, count: int) -> list[tuple[int, int]]:
    """Which elements [start, stop) of each tensor holder `index` of `count` writes, so that all write as many bytes.

    `tensors` are (number of elements, bytes of an element), the same for all holders; the first writes empty ones.
    """
    total = sum(num_elements * element_bytes for num_elements, element_bytes in tensors)
    low, high = total * index // count, total * (index + 1) // count
    result, offset = [], 0
    for num_elements, element_bytes in tensors:
        bounds = ((cut - offset) // element_bytes for cut in (low, high))
        start, stop = (min(max(bound, 0), num_elements) for bound in bounds)
        result.append((start, stop))
        offset += num_elements * element_bytes
    return result
