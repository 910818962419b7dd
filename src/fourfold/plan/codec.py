"""Codecs: what the reduction of a bucket sends when gradients are compressed, and how many bytes that is.

density  how many elements a codec sends of each tensor: of a gradient, or of activations between stages
message  what one rank sends for a bucket in one round: of fixed length, the same on every rank
round    one exchange of messages: they are summed on the way, or gathered and summed by each reader
entry    of a sparse message: a value and its index, 16 bits within a block of 65,536 elements, and a count per block
dense    consecutive slots that a sparse message sends whole, because a threshold over so few elements means nothing
Law: the length of a message is known before the first step, and counts every byte: indices and scales too.

A codec is one row of `CODECS` and one file in `comm/codec`.

Sources: Vogels et al., "PowerSGD" (2019), Alg. 1; Gupta et al., "Training Recommender Systems at Scale:
Communication-Efficient Model and Data Parallelism" (2021), Alg. 1 (DCT).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.words.errors import PlanError, Problem
from fourfold.words.layout import Change
from fourfold.words.layout import collective_sent_bytes as layout_bytes
from fourfold.words.ranges import join_ranges

# ---- density ---------------------------------------------------------------------------------------------------------


def num_sent(num_elements: int, density: float) -> int:
    """How many of the elements are sent: n − ⌊n·η⌋ with η = 1 − density, at least one."""
    # 0.1 of ten elements is one, not two: the error of binary fractions at the 9th digit is no element.
    return max(1, min(num_elements, math.ceil(num_elements * density - 1e-9)))


# ---- codec -----------------------------------------------------------------------------------------------------------

SCALE_BLOCK = 256
INDEX_BLOCK = 65536
ALIGNMENT_BYTES = 8  # bytes of a number in a message
# Kraken, a published DCT, sends tensors of fewer than 128 or 256 elements whole.
DENSE_BELOW = 256
BAND_LOW, BAND_HIGH = 0.5, 1.25


class Combine(StrEnum):
    """How the ranks' messages of a round come together."""

    SUM = "sum"
    GATHER = "gather"


@dataclass(frozen=True)
class CodecSpec:
    """A codec and its parameters. A kind ignores the parameters of the others.

    matrix_rank    powersgd: columns of the two factors
    density        topk, dct: fraction of elements sent in a reduction, above 0, at most 1; the paper's η is 1 − density
    refresh_steps  dct: how many reductions of a bucket use one threshold: one a step, or one a microbatch at zero 2
    """

    kind: str
    matrix_rank: int = 4
    density: float = 0.01
    refresh_steps: int = 100


class CodecRound(NamedTuple):
    """One exchange of a bucket's reduction: how messages are combined, and the length of one rank's message."""

    combine: Combine
    num_bytes: int


Shapes = Sequence[tuple[int, ...]]
"""The shapes of a bucket's parameters, in the order of its slots."""


def codec_rounds(spec: CodecSpec, bucket: Bucket, shapes: Shapes) -> tuple[CodecRound, ...]:
    """The rounds of a bucket's reduction. Raises PlanError for gradients that are not floating-point numbers."""
    if not bucket.dtype.startswith(("float", "bfloat")):
        names = ", ".join(slot.name for slot in bucket.slots[:3])
        got = f"codec = {spec.kind!r} and {bucket.dtype} gradients ({names})"
        raise PlanError(Problem(got, "floating-point gradients", 'codec = "none"'))
    return CODECS[spec.kind].rounds(spec, bucket, shapes)


def codec_sent_bytes(rounds: Sequence[CodecRound], *, size: int) -> float:
    """Bytes each of `size` ranks sends for a bucket, by ring: 2 (N−1)/N of a summed message, N−1 gathered ones."""
    sent = 0.0
    for each in rounds:
        if each.combine is Combine.SUM:
            sent += layout_bytes(Change.ALL_REDUCE, whole_bytes=each.num_bytes, size=size)
        else:
            sent += layout_bytes(Change.ALL_GATHER, whole_bytes=each.num_bytes * size, size=size)
    return sent


def unpadded_length(bucket: Bucket) -> int:
    """The elements of a bucket that a codec works on: all but the padding, which stays zero."""
    return bucket.slots[-1].stop


def accumulation_bytes(bucket: Bucket) -> int:
    """Bytes per element of a residual: at least those of float32, or small residuals would be rounded away."""
    return max(4, bucket.element_bytes)


class MessageLayout(NamedTuple):
    """Where the sections of a message begin, in bytes, and the length of the message."""

    starts: tuple[int, ...]
    num_bytes: int


def pack_sections(sections: Sequence[tuple[int, int]]) -> MessageLayout:
    """The sections end to end, each so many numbers of so many bytes, aligned to its numbers.

    Messages lie end to end too, so the length is aligned.
    """
    starts, end = [], 0
    for num_items, item_bytes in sections:
        start = -(-end // item_bytes) * item_bytes
        starts.append(start)
        end = start + num_items * item_bytes
    return MessageLayout(tuple(starts), -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


# ---- bf16, fp16 and int8: every element in fewer bytes ----------------------------------------------------------


def _cast_rounds(spec: CodecSpec, bucket: Bucket, shapes: Shapes) -> tuple[CodecRound, ...]:
    return (CodecRound(Combine.SUM, unpadded_length(bucket) * min(2, bucket.element_bytes)),)


def blockwise_layout(bucket: Bucket) -> MessageLayout:
    """int8: one scale per block of 256 elements, then one byte per element."""
    num_elements = unpadded_length(bucket)
    scales = (-(-num_elements // SCALE_BLOCK), accumulation_bytes(bucket))
    return pack_sections([scales, (num_elements, 1)])


def _int8_rounds(spec: CodecSpec, bucket: Bucket, shapes: Shapes) -> tuple[CodecRound, ...]:
    return (CodecRound(Combine.GATHER, blockwise_layout(bucket).num_bytes),)


# ---- topk and dct: some of the elements -------------------------------------------------------------------------


class SparseRange(NamedTuple):
    """Elements [start, stop) of a bucket, how many of them to aim for in a reduction, the least and the most."""

    start: int
    stop: int
    num_sent: int
    min_sent: int
    max_sent: int


@dataclass(frozen=True)
class SparseSpec:
    """What a sparse message holds: ranges [start, stop) sent whole, and entries chosen from the other ranges."""

    dense_ranges: tuple[tuple[int, int], ...]
    sparse_ranges: tuple[SparseRange, ...]

    @property
    def num_dense(self) -> int:
        return sum(stop - start for start, stop in self.dense_ranges)

    @property
    def capacity(self) -> int:
        """The most entries that fit into a message."""
        return sum(each.max_sent for each in self.sparse_ranges)

    def message_layout(self, bucket: Bucket) -> MessageLayout:
        """Counts by index block (int32), values (dense ranges first), indices (int16)."""
        num_counts = -(-unpadded_length(bucket) // INDEX_BLOCK) if self.sparse_ranges else 0
        values = (self.num_dense + self.capacity, bucket.element_bytes)
        return pack_sections([(num_counts, 4), values, (self.capacity, 2)])


def topk_spec(bucket: Bucket, density: float) -> SparseSpec:
    """topk: entries from the whole bucket, as many in every reduction."""
    num_elements = unpadded_length(bucket)
    count = num_sent(num_elements, density)
    if count == num_elements:
        return SparseSpec(((0, num_elements),), ())
    return SparseSpec((), (SparseRange(0, num_elements, count, count, count),))


def dct_spec(bucket: Bucket, density: float) -> SparseSpec:
    """dct: entries from each parameter that is large enough; the others are sent whole."""
    dense: list[tuple[int, int]] = []
    sparse = []
    for slot in bucket.slots:
        num_elements = slot.stop - slot.start
        count = num_sent(num_elements, density)
        if num_elements >= DENSE_BELOW and count < num_elements:
            least, most = math.floor(count * BAND_LOW), min(num_elements, math.ceil(count * BAND_HIGH))
            sparse.append(SparseRange(slot.start, slot.stop, count, least, most))
        else:
            dense.append((slot.start, slot.stop))
    return SparseSpec(tuple(join_ranges(dense)), tuple(sparse))


def _topk_rounds(spec: CodecSpec, bucket: Bucket, shapes: Shapes) -> tuple[CodecRound, ...]:
    return (CodecRound(Combine.GATHER, topk_spec(bucket, spec.density).message_layout(bucket).num_bytes),)


def _dct_rounds(spec: CodecSpec, bucket: Bucket, shapes: Shapes) -> tuple[CodecRound, ...]:
    return (CodecRound(Combine.GATHER, dct_spec(bucket, spec.density).message_layout(bucket).num_bytes),)


# ---- powersgd: matrices as products of two factors --------------------------------------------------------------


class FactoredMatrix(NamedTuple):
    """A parameter seen as [rows, columns], and where its two factors begin, in elements."""

    slot_index: int
    start: int
    rows: int
    columns: int
    p_start: int
    q_start: int


@dataclass(frozen=True)
class LowRankSpec:
    """What powersgd sends of a bucket: matrices as products of factors, the other parameters whole."""

    matrices: tuple[FactoredMatrix, ...]
    dense_ranges: tuple[tuple[int, int], ...]
    num_p: int
    num_q: int

    @property
    def num_dense(self) -> int:
        return sum(stop - start for start, stop in self.dense_ranges)


def low_rank_spec(bucket: Bucket, shapes: Shapes, matrix_rank: int) -> LowRankSpec:
    """Factors for each parameter that is larger than its factors: (rows + columns)·matrix_rank < rows·columns."""
    matrices: list[FactoredMatrix] = []
    dense: list[tuple[int, int]] = []
    num_p = num_q = 0
    for index, (slot, shape) in enumerate(zip(bucket.slots, shapes, strict=True)):
        rows = shape[0] if shape else 1
        columns = (slot.stop - slot.start) // rows
        if (rows + columns) * matrix_rank < rows * columns:
            matrices.append(FactoredMatrix(index, slot.start, rows, columns, num_p, num_q))
            num_p, num_q = num_p + rows * matrix_rank, num_q + columns * matrix_rank
        else:
            dense.append((slot.start, slot.stop))
    return LowRankSpec(tuple(matrices), tuple(join_ranges(dense)), num_p, num_q)


def _powersgd_rounds(spec: CodecSpec, bucket: Bucket, shapes: Shapes) -> tuple[CodecRound, ...]:
    low_rank, width = low_rank_spec(bucket, shapes, spec.matrix_rank), accumulation_bytes(bucket)
    first = CodecRound(Combine.SUM, (low_rank.num_p + low_rank.num_dense) * width)
    return (first, CodecRound(Combine.SUM, low_rank.num_q * width)) if low_rank.matrices else (first,)


# ---- the table --------------------------------------------------------------------------------------------------


class CodecKind(NamedTuple):
    """What is known of a codec without a tensor."""

    rounds: Callable[[CodecSpec, Bucket, Shapes], tuple[CodecRound, ...]]
    """The rounds of a bucket's reduction."""
    fields: tuple[str, ...] = ()
    """The plan fields that it reads. With another codec they have no effect."""
    remembers: tuple[str, ...] = ()
    """What each rank keeps between reductions: the keys of `Codec.state_tensors`. "remainder" is the residual."""
    is_elementwise: bool = False
    """Whether what is sent of an element depends on this element alone, not on others of its bucket."""


CODECS: dict[str, CodecKind] = {
    "bf16": CodecKind(_cast_rounds, is_elementwise=True),
    "fp16": CodecKind(_cast_rounds, is_elementwise=True),
    "int8": CodecKind(_int8_rounds, remembers=("remainder",)),
    "topk": CodecKind(_topk_rounds, fields=("codec_density",), remembers=("remainder",)),
    "powersgd": CodecKind(_powersgd_rounds, fields=("codec_rank",), remembers=("remainder", "warm")),
    "dct": CodecKind(
        _dct_rounds, fields=("codec_density", "codec_refresh_steps"), remembers=("remainder", "threshold", "age")
    ),
}
