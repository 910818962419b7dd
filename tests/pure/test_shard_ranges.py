"""Laws of shard ranges: which elements of a whole parameter a range of a shard is."""

import itertools
import math
import random

import pytest

from fourfold.plan.checkpoint_boxes import Part, blocks, is_tiling
from fourfold.plan.param_spec import ShardPiece, TensorShard
from fourfold.plan.shard_ranges import ShardRange, held_ranges, stored_ranges


def fused(shape, dim, pieces):
    """The shards of places, from the pieces of each: (start, stop) or (start, stop, replica, num_replicas)."""
    return [TensorShard(shape, dim, tuple(ShardPiece(*each) for each in own)) for own in pieces]


PARAMETERS = {
    "columns": [TensorShard.even((6, 4), 0, index, 3) for index in range(3)],
    "rows": [TensorShard.even((5, 6), 1, index, 3) for index in range(3)],
    "uneven": [TensorShard.even((7, 3), 0, index, 3) for index in range(3)],
    "an empty place": [TensorShard.even((4, 2), 0, index, 3) for index in range(3)],
    "whole": [TensorShard.whole((3, 5), index, 4) for index in range(4)],
    "scalar": [TensorShard.whole((), index, 2) for index in range(2)],
    "no elements": [TensorShard.whole((0, 3), index, 2) for index in range(2)],
    "fused": fused((12, 2), 0, [((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))]),
    "fused along the last dim": fused((3, 12), 1, [((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))]),
    "fused in the middle": fused((2, 4, 3), 1, [((0, 1), (2, 3)), ((1, 2), (3, 4))]),
    "replicated keys": fused(
        (4, 8),
        1,
        [
            ((0, 1), (4, 6, 0, 2)),
            ((1, 2), (4, 6, 1, 2)),
            ((2, 3), (6, 8, 0, 2)),
            ((3, 4), (6, 8, 1, 2)),
        ],
    ),
}


def whole_indices(part: Part, shape: tuple[int, ...]) -> list[int]:
    """The flat indices, in the whole tensor, of a part's elements."""
    found = []
    for _, box in blocks(part):
        ranges = [range(offset, offset + length) for offset, length in zip(*box, strict=True)]
        for place in itertools.product(*ranges):
            found.append(sum(i * math.prod(shape[dim + 1 :]) for dim, i in enumerate(place)))
    return found


def local_elements(shard: TensorShard) -> list[int]:
    """The flattened local tensor of a whole one whose elements are their flat indices."""
    found = {}
    for box, own in zip(shard.boxes, shard.local_boxes, strict=True):
        whole = whole_indices(Part(box, 0, box.num_elements), shard.shape)
        local = whole_indices(Part(own, 0, own.num_elements), shard.local_shape)
        found |= dict(zip(local, whole, strict=True))
    return [found[index] for index in range(shard.num_elements)]


def rows_indices(each: ShardRange) -> list[int]:
    """Where the elements lie in the range."""
    return [
        rows.start + row * rows.stride + column
        for rows in each.rows
        for row in range(rows.num_rows)
        for column in range(rows.length)
    ]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_range_of_a_shard_is_these_elements_of_the_whole(name):
    for shard in PARAMETERS[name]:
        local = local_elements(shard)
        for start, stop in itertools.combinations(range(shard.num_elements + 1), 2):
            found = {}
            for each in held_ranges(shard, start, stop):
                found |= dict(zip(rows_indices(each), whole_indices(each.part, shard.shape), strict=True))
            assert [found[index] for index in range(stop - start)] == local[start:stop]


@pytest.mark.parametrize("name", PARAMETERS)
def test_stored_ranges_tile_the_parameter_however_places_divide_their_shards(name):
    shards, generator = PARAMETERS[name], random.Random(3)
    for _ in range(20):
        parts: list[Part] = []
        for shard in shards:
            cuts = sorted(generator.randint(0, shard.num_elements) for _ in range(2))
            bounds = [0, *cuts, shard.num_elements] if shard.num_elements else [0, 0]
            local = local_elements(shard)
            for start, stop in itertools.pairwise(bounds):
                for each in stored_ranges(shard, start, stop):
                    parts.append(each.part)
                    stored = [local[start + index] for index in rows_indices(each)]
                    assert stored == whole_indices(each.part, shard.shape)
        assert is_tiling(parts, shards[0].shape)
        assert parts, "even a parameter without elements is stored"


def test_places_that_hold_the_same_store_about_as_much():
    sizes = [stored_ranges(shard, 0, shard.num_elements) for shard in PARAMETERS["whole"]]
    assert [sum(each.part.num_elements for each in found) for found in sizes] == [3, 4, 4, 4]
