"""Codecs, thought: what a bucket's reduction becomes on the wire, and how many bytes that is.

message   what one rank says of a bucket in one round; its length never changes, and is the same on every rank
round     a message and how the ranks' messages meet: summed on the way, or gathered and summed by whoever reads them
entry     a value and its place: 16 bits inside a block of 65,536 elements, and a count for each block
stretch   consecutive slots of a sparse message that are sent whole, because a threshold of so few means nothing
Law: every byte of a message is counted, places and scales included, and known before the first step.

Sources: Vogels et al., "PowerSGD" (2019), Alg. 1; Gupta et al., "Training Recommender Systems at Scale:
Communication-Efficient Model and Data Parallelism" (2021), Alg. 1 (DCT).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fourfold.plan.data.buckets import Bucket
from fourfold.words.errors import PlanError, Problem
from fourfold.words.layout import Change
from fourfold.words.layout import collective_sent_bytes as layout_bytes

CODECS = ("bf16", "fp16", "int8", "topk", "powersgd", "dct")
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
    """A codec and its parameters, those of other kinds unused.

    rank     powersgd: columns of the two factors
    density  topk, dct: the share of elements sent in a step, above 0, at most 1; the paper's sparsity η is 1 − density
    life     dct: steps for which a threshold is used
    """

    kind: str
    matrix_rank: int = 4
    density: float = 0.01
    refresh_steps: int = 100

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in CODECS:
            problems.append(Problem(f"codec = {self.kind!r}", "one of " + ", ".join(CODECS)))
        if self.matrix_rank < 1:
            problems.append(Problem(f"codec_rank = {self.matrix_rank}", "at least 1", "codec_rank = 4"))
        if not 0.0 < self.density <= 1.0:
            problems.append(Problem(f"codec_density = {self.density}", "above 0, at most 1", "codec_density = 0.01"))
        if self.refresh_steps < 1:
            problems.append(
                Problem(f"codec_refresh_steps = {self.refresh_steps}", "at least 1", "codec_refresh_steps = 100")
            )
        if problems:
            raise PlanError(problems, where="the codec")


class CodecRound(NamedTuple):
    """One exchange of a bucket's reduction: how it meets, and the length of one rank's message."""

    combine: Combine
    num_bytes: int


Shapes = Sequence[tuple[int, ...]]
"""The shapes of a bucket's parameters, in the order of its slots."""


def codec_rounds(spec: CodecSpec, bucket: Bucket, shapes: Shapes) -> tuple[CodecRound, ...]:
    """What the reduction of a bucket consists of. Raises PlanError for gradients that are no floating-point numbers."""
    if not bucket.dtype.startswith(("float", "bfloat")):
        names = ", ".join(slot.name for slot in bucket.slots[:3])
        got = f"codec = {spec.kind!r} and {bucket.dtype} gradients ({names})"
        raise PlanError(Problem(got, "floating-point gradients", 'codec = "none"'))
    if spec.kind in ("bf16", "fp16"):
        return (CodecRound(Combine.SUM, unpadded_length(bucket) * min(2, bucket.element_bytes)),)
    if spec.kind == "powersgd":
        low_rank = low_rank_spec(bucket, shapes, spec.matrix_rank)
        width = accumulation_bytes(bucket)
        first = CodecRound(Combine.SUM, (low_rank.num_p + low_rank.num_dense) * width)
        return (first, CodecRound(Combine.SUM, low_rank.num_q * width)) if low_rank.matrices else (first,)
    sections = blockwise_layout(bucket) if spec.kind == "int8" else sparse_spec(spec, bucket).message_layout(bucket)
    return (CodecRound(Combine.GATHER, sections.num_bytes),)


def supports_all_reduce(steps: Sequence[CodecRound]) -> bool:
    """Whether messages may be summed as they are, in any grouping, before they are read: one round, a sum."""
    return len(steps) == 1 and steps[0].combine is Combine.SUM


def codec_sent_bytes(steps: Sequence[CodecRound], *, size: int) -> float:
    """Bytes each of `size` ranks sends for a bucket, by ring: 2 (N−1)/N of a summed message, N−1 gathered ones."""
    sent = 0.0
    for step in steps:
        if step.combine is Combine.SUM:
            sent += layout_bytes(Change.ALL_REDUCE, whole_bytes=step.num_bytes, size=size)
        else:
            sent += layout_bytes(Change.ALL_GATHER, whole_bytes=step.num_bytes * size, size=size)
    return sent


def unpadded_length(bucket: Bucket) -> int:
    """Elements of a bucket that a codec is about: all but the padding, which is zero and stays so."""
    return bucket.slots[-1].stop


def accumulation_bytes(bucket: Bucket) -> int:
    """Bytes of an element of what is remembered: at least float32, else small remainders would be rounded away."""
    return max(4, bucket.element_bytes)


class MessageSection(NamedTuple):
    """A part of a message: `num` numbers of `width` bytes each."""

    num_items: int
    item_bytes: int


class MessageLayout(NamedTuple):
    """Where the parts of a message begin, in bytes, and where it ends."""

    starts: tuple[int, ...]
    num_bytes: int


def pack_sections(sections: Sequence[MessageSection]) -> MessageLayout:
    """The sections one after the other, each at a multiple of its width; messages lie end to end, so the whole too."""
    starts, end = [], 0
    for num, width in sections:
        start = -(-end // width) * width
        starts.append(start)
        end = start + num * width
    return MessageLayout(tuple(starts), -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def blockwise_layout(bucket: Bucket) -> MessageLayout:
    """int8: a scale for each block of 256 elements, then a byte for each element."""
    return pack_sections(
        [
            MessageSection(-(-unpadded_length(bucket) // SCALE_BLOCK), accumulation_bytes(bucket)),
            MessageSection(unpadded_length(bucket), 1),
        ]
    )


def num_sent(num_elements: int, density: float) -> int:
    """How many of the elements are sent: n − ⌊n·η⌋ with η = 1 − density, at least one."""
    # A density of 0.1 of ten elements is one, not two: what binary fractions add at the 9th digit is no element.
    return max(1, min(num_elements, math.ceil(num_elements * density - 1e-9)))


class SparseRange(NamedTuple):
    """A stretch of a bucket of which `kept` elements are to be sent; no more than `high` can be, below `low` is few."""

    start: int
    stop: int
    num_sent: int
    min_sent: int
    max_sent: int


@dataclass(frozen=True)
class SparseSpec:
    """What a sparse message holds: stretches [start, stop) sent whole, and the entries chosen from the others."""

    dense_ranges: tuple[tuple[int, int], ...]
    sparse_ranges: tuple[SparseRange, ...]

    @property
    def num_dense(self) -> int:
        return sum(stop - start for start, stop in self.dense_ranges)

    @property
    def capacity(self) -> int:
        """The most entries a message has place for."""
        return sum(each.max_sent for each in self.sparse_ranges)

    def message_layout(self, bucket: Bucket) -> MessageLayout:
        """Counts by place block (int32), values (whole stretches first), places (int16)."""
        counts = -(-unpadded_length(bucket) // INDEX_BLOCK) if self.sparse_ranges else 0
        values = MessageSection(self.num_dense + self.capacity, bucket.element_bytes)
        return pack_sections([MessageSection(counts, 4), values, MessageSection(self.capacity, 2)])


def sparse_spec(spec: CodecSpec, bucket: Bucket) -> SparseSpec:
    """What is chosen from a bucket: by topk from all of it, by dct from each parameter that is large enough."""
    if spec.kind == "topk":
        num_elements = unpadded_length(bucket)
        count = num_sent(num_elements, spec.density)
        if count == num_elements:
            return SparseSpec(((0, num_elements),), ())
        return SparseSpec((), (SparseRange(0, num_elements, count, count, count),))
    whole: list[tuple[int, int]] = []
    chosen = []
    for slot in bucket.slots:
        num_elements = slot.stop - slot.start
        count = num_sent(num_elements, spec.density)
        if num_elements >= DENSE_BELOW and count < num_elements:
            low, high = math.floor(count * BAND_LOW), min(num_elements, math.ceil(count * BAND_HIGH))
            chosen.append(SparseRange(slot.start, slot.stop, count, low, high))
        elif whole and whole[-1][1] == slot.start:
            whole[-1] = whole[-1][0], slot.stop
        else:
            whole.append((slot.start, slot.stop))
    return SparseSpec(tuple(whole), tuple(chosen))


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
    """What powersgd does with a bucket: matrices as products of factors, the rest whole."""

    matrices: tuple[FactoredMatrix, ...]
    dense_ranges: tuple[tuple[int, int], ...]
    num_p: int
    num_q: int

    @property
    def num_dense(self) -> int:
        return sum(stop - start for start, stop in self.dense_ranges)


def low_rank_spec(bucket: Bucket, shapes: Shapes, matrix_rank: int) -> LowRankSpec:
    """Which parameters become factors: those whose factors are smaller than they are, (rows + columns)·rank < size."""
    matrices: list[FactoredMatrix] = []
    whole: list[tuple[int, int]] = []
    left = right = 0
    for number, (slot, shape) in enumerate(zip(bucket.slots, shapes, strict=True)):
        rows = shape[0] if shape else 1
        columns = (slot.stop - slot.start) // rows
        if (rows + columns) * matrix_rank < rows * columns:
            matrices.append(FactoredMatrix(number, slot.start, rows, columns, left, right))
            left, right = left + rows * matrix_rank, right + columns * matrix_rank
        elif whole and whole[-1][1] == slot.start:
            whole[-1] = whole[-1][0], slot.stop
        else:
            whole.append((slot.start, slot.stop))
    return LowRankSpec(tuple(matrices), tuple(whole), left, right)
