"""Laws of codecs without tensors: rounds, message bytes, and which buckets are refused."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourfold.axes.data.rules.buckets import Bucket, Slot
from fourfold.plan.codec import (
    CODECS,
    DENSE_BELOW,
    CodecSpec,
    Combine,
    codec_rounds,
    codec_sent_bytes,
    dct_spec,
    low_rank_spec,
    num_sent,
)
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS, PLAN_FIELDS
from fourfold.words.errors import PlanError

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 600)), st.tuples(st.integers(1, 60), st.integers(1, 60)), st.just(())),
    min_size=1,
    max_size=6,
)


def bucket_of(shapes, dtype="float32", element_bytes=4) -> Bucket:
    slots, start = [], 0
    for number, shape in enumerate(shapes):
        size = 1
        for length in shape:
            size *= length
        slots.append(Slot(f"p{number}", start, start + size))
        start += size
    return Bucket(0, tuple(slots), start, dtype, element_bytes, 0)


@example(num_elements=100, percent=7)  # 100 · 0.07 is 7.000000000000001
@given(num_elements=st.integers(1, 10**6), percent=st.integers(1, 100))
def test_num_sent_is_the_complement_of_the_sparsity(num_elements, percent):
    # n − ⌊n·η⌋ in whole numbers, η = 1 − percent / 100.
    assert num_sent(num_elements, percent / 100) == num_elements - num_elements * (100 - percent) // 100


@given(shapes=SHAPES, density=st.floats(0.001, 1.0), rank=st.integers(1, 8))
def test_dense_and_compressed_ranges_tile_a_bucket(shapes, density, rank):
    bucket = bucket_of(shapes)
    dct = dct_spec(bucket, density)
    ranges = [*dct.dense_ranges, *((each.start, each.stop) for each in dct.sparse_ranges)]
    low_rank = low_rank_spec(bucket, shapes, rank)
    matrices = [(each.start, each.start + each.rows * each.columns) for each in low_rank.matrices]
    for tiles in (ranges, [*low_rank.dense_ranges, *matrices]):
        tiles.sort()
        assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles[:-1])]
        assert tiles[-1][1] == bucket.size
    for each in dct.sparse_ranges:
        assert each.stop - each.start >= DENSE_BELOW
        assert each.min_sent <= each.num_sent <= each.max_sent <= each.stop - each.start
    for each in low_rank.matrices:
        assert (each.rows + each.columns) * rank < each.rows * each.columns


@given(shapes=SHAPES, density=st.floats(0.001, 0.5), rank=st.integers(1, 4), width=st.sampled_from([4, 8]))
def test_no_codec_sends_more_than_the_uncompressed_bucket(shapes, density, rank, width):
    bucket = bucket_of(shapes, f"float{8 * width}", width)
    for kind in CODECS:
        rounds = codec_rounds(CodecSpec(kind, matrix_rank=rank, density=density), bucket, shapes)
        # The overhead of every message: at least one entry, a scale, a count per index block, alignment.
        assert sum(each.num_bytes for each in rounds) <= bucket.num_bytes + 4 + width + 8


@given(shapes=SHAPES)
def test_a_cast_sums_one_message(shapes):
    for kind in ("bf16", "fp16"):
        rounds = codec_rounds(CodecSpec(kind), bucket_of(shapes), shapes)
        assert [each.combine for each in rounds] == [Combine.SUM]


def test_the_plan_fields_of_a_codec_apply_only_with_it():
    fields = {name for row in CODECS.values() for name in row.fields}
    assert fields == {name for name in FIELDS if name.startswith("codec_")}
    for kind, row in CODECS.items():
        for name in fields:
            need, applies = PLAN_FIELDS[name].needs or ("", None)
            assert applies is not None
            assert applies(Plan(dp=2, codec=kind)) == (name in row.fields) == (f'"{kind}"' in need.split())


def test_message_bytes_of_each_codec():
    # A matrix of 512 × 1024 and a vector of 1024, float32: 525,312 elements, 9 index blocks.
    shapes = [(512, 1024), (1024,)]
    bucket = bucket_of(shapes)

    def bytes_of(kind, **parameters):
        return [tuple(each) for each in codec_rounds(CodecSpec(kind, **parameters), bucket, shapes)]

    assert bytes_of("bf16") == bytes_of("fp16") == [(Combine.SUM, 2 * 525_312)]
    assert bytes_of("int8") == [(Combine.GATHER, 525_312 + 4 * 2052)]
    assert bytes_of("topk", density=0.01) == [(Combine.GATHER, 5254 * 6 + 9 * 4)]
    assert bytes_of("powersgd", matrix_rank=2) == [(Combine.SUM, 4 * (2 * 512 + 1024)), (Combine.SUM, 4 * 2 * 1024)]
    # Room for a quarter more than ⌈5242.88⌉ and ⌈10.24⌉ entries; messages end at a multiple of 8.
    assert bytes_of("dct", density=0.01) == [(Combine.GATHER, (6554 + 14) * 6 + 9 * 4 + 4)]


def test_gathered_messages_are_sent_to_every_other_rank():
    bucket = bucket_of([(64, 64)])
    summed, gathered = (
        codec_rounds(CodecSpec("bf16"), bucket, [(64, 64)]),
        codec_rounds(CodecSpec("int8"), bucket, [(64, 64)]),
    )
    assert codec_sent_bytes(summed, size=4) == pytest.approx(2 * 3 / 4 * 2 * 4096)
    assert codec_sent_bytes(gathered, size=4) == 3 * (4096 + 4 * 16)
    assert codec_sent_bytes(gathered, size=1) == 0


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "uint8"])
def test_codecs_refuse_gradients_that_are_not_floating_point(kind, dtype):
    with pytest.raises(PlanError, match=rf"{dtype} gradients \(p0\)"):
        codec_rounds(CodecSpec(kind), bucket_of([(4, 4)], dtype, 4), [(4, 4)])
