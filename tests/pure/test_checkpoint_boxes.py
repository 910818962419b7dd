"""Laws of checkpoint boxes: blocks, overlaps and tilings of parts, compared with NumPy; and who writes what."""

import functools
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.checkpoint_boxes import (
    ELEMENT_BYTES,
    Part,
    blocks,
    divide_writing,
    flattened,
    intersection,
    is_inside,
    is_tiling,
    overlaps,
    relative_slices,
    whole,
)
from fourfold.words.ranges import Box

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


@st.composite
def parts_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    box = draw(boxes_in(shape))
    low, high = sorted((draw(st.integers(0, box.num_elements)), draw(st.integers(0, box.num_elements))))
    return Part(box, low, high)


def elements(part: Part, shape: tuple[int, ...]) -> list[int]:
    """The elements of a part in the flattened tensor, in order: what NumPy slices."""
    box = np.arange(math.prod(shape)).reshape(shape)[relative_slices(part.box, whole(shape).box)]
    return box.reshape(-1)[part.start : part.stop].tolist()


@given(shape=SHAPES, data=st.data())
def test_the_blocks_of_a_part_are_its_elements_in_order(shape, data):
    part = data.draw(parts_in(shape))
    found = blocks(part)
    assert [x for block in found for x in elements(Part(block.box, 0, block.box.num_elements), shape)] == elements(
        part, shape
    )
    starts = itertools.accumulate((block.box.num_elements for block in found), initial=0)
    assert [block.start for block in found] == list(starts)[: len(found)]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(shape=SHAPES, data=st.data())
def test_the_overlaps_of_two_parts_copy_what_they_have_in_common(shape, data):
    stored, wanted = data.draw(parts_in(shape)), data.draw(parts_in(shape))
    source, result = np.array(elements(stored, shape), dtype=int), np.full(wanted.num_elements, -1)
    for first, second, common in overlaps(stored, wanted):
        found = source[first.start :][: first.box.num_elements].reshape(first.box.lengths)
        target = result[second.start :][: second.box.num_elements].reshape(second.box.lengths)
        assert (target[relative_slices(common, second.box)] == -1).all()  # nothing is copied twice
        target[relative_slices(common, second.box)] = found[relative_slices(common, first.box)]
    expected = elements(wanted, shape)
    assert result.tolist() == [x if x in source else -1 for x in expected]


@given(shape=SHAPES, data=st.data())
def test_ranges_of_one_box_overlap_alike_in_one_dim(shape, data):
    a = data.draw(parts_in(shape))
    low, high = sorted(data.draw(st.integers(0, a.box.num_elements)) for _ in range(2))
    b = a._replace(start=low, stop=high)
    both = [
        sum(each.common.num_elements for each in overlaps(*pair)) for pair in ((a, b), (flattened(a), flattened(b)))
    ]
    assert both == [max(0, min(a.stop, b.stop) - max(a.start, b.start))] * 2


@st.composite
def tilings(draw: st.DrawFn, box: Box) -> list[Part]:
    """A tiling of a box, cut again and again, by planes or as a range of elements."""
    dims = [dim for dim, length in enumerate(box.lengths) if length > 1]
    choice = draw(st.integers(0, 3 if dims else 1))
    if choice == 0:
        return [Part(box, 0, box.num_elements)]
    if choice == 1:
        cuts = sorted({0, box.num_elements, *draw(st.lists(st.integers(0, box.num_elements), max_size=3))})
        return [Part(box, low, high) for low, high in itertools.pairwise(cuts)] or [Part(box, 0, 0)]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(1, box.lengths[dim] - 1))
    result = []
    for offset, length in ((0, cut), (cut, box.lengths[dim] - cut)):
        offsets = tuple(x + offset * (d == dim) for d, x in enumerate(box.offsets))
        lengths = tuple(length if d == dim else n for d, n in enumerate(box.lengths))
        result += draw(tilings(Box(offsets, lengths)))
    return result


@given(shape=SHAPES, data=st.data())
def test_a_tiling_is_one_and_with_any_part_lost_moved_or_doubled_it_is_none(shape, data):
    parts = data.draw(st.permutations(data.draw(tilings(whole(shape).box))))
    assert all(is_inside(part, shape) for part in parts)
    assert is_tiling(parts, shape)
    filled = [part for part in parts if part.num_elements]
    if filled:
        victim = data.draw(st.sampled_from(filled))
        rest = [part for part in parts if part is not victim]
        assert not is_tiling(rest, shape)
        assert not is_tiling([*parts, victim], shape)
        other = data.draw(parts_in(shape))
        covered = sorted(x for part in (*rest, other) for x in elements(part, shape))
        assert is_tiling([*rest, other], shape) == (covered == list(range(math.prod(shape))))


@given(shape=SHAPES, data=st.data())
def test_parts_of_the_right_total_tile_only_if_every_element_is_covered_once(shape, data):
    parts = data.draw(st.lists(parts_in(shape), max_size=5))
    covered = sorted(x for part in parts for x in elements(part, shape))
    assert is_tiling(parts, shape) == (covered == list(range(math.prod(shape))))


def test_boxes_around_a_hole_that_no_plane_separates_tile():
    assert is_tiling([Part(box, 0, box.num_elements) for box in spiral(1)], (3, 3))
    overlapping = [*spiral(1)[1:], Box((0, 0), (1, 1))]
    assert not is_tiling([Part(box, 0, box.num_elements) for box in overlapping], (3, 3))


def spiral(rings: int) -> list[Box]:
    """Boxes around a hole, ring in ring: they tile a square, and no plane separates them."""
    result = [Box((rings, rings), (1, 1))]
    for start in range(rings):
        n = 2 * (rings - start)  # the length of each of the four boxes
        corners = ((start, start), (start, start + n), (start + n, start + 1), (start + 1, start))
        lengths = ((1, n), (n, 1), (1, n), (n, 1))
        result += [Box(corner, each) for corner, each in zip(corners, lengths, strict=True)]
    return result


@functools.cache
def hostile(count: int) -> dict[str, tuple[list[Part], tuple[int, ...]]]:
    """Many parts that comparing all pairs would take minutes for: by what they are made of."""
    chain = [Part(Box((0, n), (2, 2)), 0, 4) for n in range(count)]
    stacked = [Part(Box((n, 0), (count - n, 1)), 0, 1) for n in range(count)]
    ranges = [Part(Box((0, 0), (2 * count, 2)), 4 * n, 4 * n + 4) for n in reversed(range(count))]
    rings = count // 4
    return {
        "overlapping boxes": (chain, (2, 2 * count)),
        "boxes with one corner": (stacked, (count, 1)),
        "ranges of one box": (ranges, (2 * count, 2)),
        "a spiral": ([Part(box, 0, box.num_elements) for box in spiral(rings)], (2 * rings + 1, 2 * rings + 1)),
    }


@pytest.mark.parametrize("kind", hostile(4))
def test_the_work_on_many_parts_is_bounded(kind):
    parts, shape = hostile(10_000)[kind]
    begin = time.process_time()
    assert is_tiling(parts, shape) == (kind in ("boxes with one corner", "ranges of one box"))
    assert time.process_time() - begin < 5
    few, shape = hostile(40)[kind]
    assert is_tiling(few, shape) == (kind != "overlapping boxes")


@pytest.mark.parametrize(
    "part",
    [
        Part(Box((1, 0), (4, 2)), 0, 8),
        Part(Box((-1, 0), (4, 2)), 0, 8),
        Part(Box((0, 0), (4, -2)), 0, 0),
        Part(Box((0,), (4,)), 0, 4),
        Part(Box((0, 0), (4,)), 0, 4),
        Part(Box((0, 0), (4, 2)), 0, 9),
        Part(Box((0, 0), (4, 2)), -1, 8),
        Part(Box((0, 0), (4, 2)), 5, 4),
    ],
    ids=str,
)
def test_a_part_outside_of_its_tensor_is_not_inside(part):
    assert not is_inside(part, (4, 2))
    assert is_inside(Part(Box((1, 0), (3, 2)), 2, 6), (4, 2))


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(sorted(set(ELEMENT_BYTES.values()))))), st.integers(1, 7))
def test_holders_divide_their_tensors_evenly_and_completely(tensors, count):
    shares = [divide_writing(tensors, index, count) for index in range(count)]
    for number, (num_elements, _) in enumerate(tensors):
        ranges = [share[number] for share in shares]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == num_elements
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    sizes = [
        sum((stop - start) * size for (start, stop), (_, size) in zip(share, tensors, strict=True)) for share in shares
    ]
    assert max(sizes) - min(sizes) <= 2 * 8 + 1


def test_boxes_that_only_touch_have_nothing_in_common():
    assert intersection(Box((0, 0), (2, 2)), Box((2, 0), (2, 2))) is None
    assert intersection(Box((), ()), Box((), ())) == Box((), ())
