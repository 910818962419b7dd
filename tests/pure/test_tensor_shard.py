"""Tensor shards: the pieces of all places tile a parameter, and each element is counted by one place."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.param_spec import ShardPiece, TensorShard


@st.composite
def shards_of_all_places(draw):
    """The shards of one parameter: parts of its dim, some split evenly among places, some held by several."""
    size, dim = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    parts = draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2])), min_size=1, max_size=3))
    pieces: list[list[ShardPiece]] = [[] for _ in range(size)]
    start = 0
    for unit, sharing in parts:
        sharing = sharing if size % sharing == 0 else 1
        for index in range(size):
            first = start + index // sharing * unit
            pieces[index].append(ShardPiece(first, first + unit, index % sharing, sharing))
        start += unit * (size // sharing)
    shape = [2, 3, 2]
    shape[dim] = start
    return [TensorShard(tuple(shape), dim, tuple(each)) for each in pieces]


def local(shard: TensorShard, whole: np.ndarray) -> np.ndarray:
    return np.concatenate([whole.take(range(p.start, p.stop), shard.dim) for p in shard.pieces], shard.dim)


@given(shards_of_all_places())
def test_every_element_is_counted_by_one_place(shards):
    whole = np.arange(math.prod(shards[0].shape)).reshape(shards[0].shape)
    counted = []
    for shard in shards:
        flat = local(shard, whole).ravel()
        assert flat.size == shard.num_elements
        left_out = {i for start, stop in shard.uncounted_ranges for i in range(start, stop)}
        counted += [int(value) for i, value in enumerate(flat) if i not in left_out]
    assert sorted(counted) == list(range(whole.size))


@given(shards_of_all_places())
def test_ranges_name_the_elements_of_the_local_tensor_in_its_order(shards):
    whole = np.arange(math.prod(shards[0].shape)).reshape(shards[0].shape)
    for shard in shards:
        ranges = list(shard.element_ranges)
        assert [i for start, stop in ranges for i in range(start, stop)] == local(shard, whole).ravel().tolist()
        assert all(start < stop for start, stop in ranges)
        assert all(one[1] != other[0] for one, other in itertools.pairwise(ranges))


def test_ranges_of_few_and_of_no_elements():
    assert list(TensorShard.whole(()).element_ranges) == [(0, 1)]
    assert list(TensorShard.whole((3, 4)).element_ranges) == [(0, 12)]
    assert [list(TensorShard.even((5, 2), 0, index, 4).element_ranges) for index in range(4)] == [
        [(0, 4)], [(4, 8)], [(8, 10)], [],
    ]  # fmt: skip
    assert list(TensorShard.even((5, 0), 0, 0, 4).element_ranges) == []


@given(shards_of_all_places())
def test_boxes_name_the_elements_of_the_local_tensor(shards):
    whole = np.arange(math.prod(shards[0].shape)).reshape(shards[0].shape)
    for shard in shards:
        part = local(shard, whole)
        assert part.shape == shard.local_shape
        for box, local_box in zip(shard.boxes, shard.local_boxes, strict=True):
            there, here = (
                array[tuple(slice(a, a + n) for a, n in zip(*each, strict=True))]
                for array, each in ((whole, box), (part, local_box))
            )
            assert (there == here).all()


@given(st.integers(1, 9), st.integers(1, 5))
def test_even_shards_tile_a_dim_of_any_length_and_only_the_last_are_shorter(length, size):
    shards = [TensorShard.even((2, length), 1, index, size) for index in range(size)]
    (pieces,) = zip(*(shard.pieces for shard in shards), strict=True)
    assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
    assert pieces[-1].stop == length
    lengths = [p.length for p in pieces]
    assert lengths == sorted(lengths, reverse=True)
    assert len({n for n in lengths if n}) <= 2


def test_a_whole_parameter_is_counted_by_the_first_place():
    shards = [TensorShard.whole((4, 3), index, 2) for index in range(2)]
    assert [shard.is_whole for shard in shards] == [True, True]
    assert [shard.uncounted_ranges for shard in shards] == [(), ((0, 12),)]
    scalars = [TensorShard.whole((), index, 2) for index in range(2)]
    assert [(each.num_elements, each.local_shape) for each in scalars] == [(1, ()), (1, ())]
    assert list(itertools.chain(*(each.uncounted_ranges for each in scalars))) == [(0, 1)]
