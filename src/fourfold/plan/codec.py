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

from fourfold.plan.data import Bucket
from fourfold.words.errors import PlanError, Problem
from fourfold.words.layout import Change
from fourfold.words.layout import sent_bytes as layout_bytes

KINDS = ("bf16", "fp16", "int8", "topk", "powersgd", "dct")
SCALE_BLOCK = 256
PLACE_BLOCK = 65536
WIDEST = 8  # bytes of a number in a message
# Kraken, a published DCT, sends tensors of fewer than 128 or 256 elements whole.
WHOLE_BELOW = 256
BAND_LOW, BAND_HIGH = 0.5, 1.25


class Meet(StrEnum):
    """How the ranks' messages of a round come together."""

    SUM = "sum"
    GATHER = "gather"


@dataclass(frozen=True)
class Coding:
    """A codec and its parameters, those of other kinds unused.

    rank     powersgd: columns of the two factors
    density  topk, dct: the share of elements sent in a step, above 0, at most 1; the paper's sparsity η is 1 − density
    life     dct: steps for which a threshold is used
    """

    kind: str
    rank: int = 4
    density: float = 0.01
    life: int = 100

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(Problem(f"codec = {self.kind!r}", "one of " + ", ".join(KINDS)))
        if self.rank < 1:
            problems.append(Problem(f"codec_rank = {self.rank}", "at least 1", "codec_rank = 4"))
        if not 0.0 < self.density <= 1.0:
            problems.append(Problem(f"codec_density = {self.density}", "above 0, at most 1", "codec_density = 0.01"))
        if self.life < 1:
            problems.append(Problem(f"codec_life = {self.life}", "at least 1", "codec_life = 100"))
        if problems:
            raise PlanError(problems, where="the codec")


class Round(NamedTuple):
    """One exchange of a bucket's reduction: how it meets, and the length of one rank's message."""

    meet: Meet
    num_bytes: int


Shapes = Sequence[tuple[int, ...]]
"""The shapes of a bucket's parameters, in the order of its slots."""


def rounds(coding: Coding, bucket: Bucket, shapes: Shapes) -> tuple[Round, ...]:
    """What the reduction of a bucket consists of. Raises PlanError for gradients that are no floating-point numbers."""
    if not bucket.dtype.startswith(("float", "bfloat")):
        names = ", ".join(slot.name for slot in bucket.slots[:3])
        got = f"codec = {coding.kind!r} and {bucket.dtype} gradients ({names})"
        raise PlanError(Problem(got, "floating-point gradients", 'codec = "none"'))
    if coding.kind in ("bf16", "fp16"):
        return (Round(Meet.SUM, length(bucket) * min(2, bucket.element_bytes)),)
    if coding.kind == "powersgd":
        low_rank = factor(bucket, shapes, coding.rank)
        width = work_bytes(bucket)
        first = Round(Meet.SUM, (low_rank.num_left + low_rank.num_whole) * width)
        return (first, Round(Meet.SUM, low_rank.num_right * width)) if low_rank.matrices else (first,)
    sections = blockwise(bucket) if coding.kind == "int8" else sparse(coding, bucket).sections(bucket)
    return (Round(Meet.GATHER, sections.num_bytes),)


def commutes(steps: Sequence[Round]) -> bool:
    """Whether messages may be summed as they are, in any grouping, before they are read: one round, a sum."""
    return len(steps) == 1 and steps[0].meet is Meet.SUM


def sent_bytes(steps: Sequence[Round], *, size: int) -> float:
    """Bytes each of `size` ranks sends for a bucket, by ring: 2 (N−1)/N of a summed message, N−1 gathered ones."""
    sent = 0.0
    for step in steps:
        if step.meet is Meet.SUM:
            sent += layout_bytes(Change.ALL_REDUCE, whole_bytes=step.num_bytes, size=size)
        else:
            sent += layout_bytes(Change.ALL_GATHER, whole_bytes=step.num_bytes * size, size=size)
    return sent


def length(bucket: Bucket) -> int:
    """Elements of a bucket that a codec is about: all but the padding, which is zero and stays so."""
    return bucket.slots[-1].stop


def work_bytes(bucket: Bucket) -> int:
    """Bytes of an element of what is remembered: at least float32, else small remainders would be rounded away."""
    return max(4, bucket.element_bytes)


class Section(NamedTuple):
    """A part of a message: `num` numbers of `width` bytes each."""

    num: int
    width: int


class Sections(NamedTuple):
    """Where the parts of a message begin, in bytes, and where it ends."""

    starts: tuple[int, ...]
    num_bytes: int


def lay(sections: Sequence[Section]) -> Sections:
    """The sections one after the other, each at a multiple of its width; messages lie end to end, so the whole too."""
    starts, end = [], 0
    for num, width in sections:
        start = -(-end // width) * width
        starts.append(start)
        end = start + num * width
    return Sections(tuple(starts), -(-end // WIDEST) * WIDEST)


def blockwise(bucket: Bucket) -> Sections:
    """int8: a scale for each block of 256 elements, then a byte for each element."""
    return lay([Section(-(-length(bucket) // SCALE_BLOCK), work_bytes(bucket)), Section(length(bucket), 1)])


def kept(num_elements: int, density: float) -> int:
    """How many of the elements are sent: n − ⌊n·η⌋ with η = 1 − density, at least one."""
    # A density of 0.1 of ten elements is one, not two: what binary fractions add at the 9th digit is no element.
    return max(1, min(num_elements, math.ceil(num_elements * density - 1e-9)))


class Chosen(NamedTuple):
    """A stretch of a bucket of which `kept` elements are to be sent; no more than `high` can be, below `low` is few."""

    start: int
    stop: int
    kept: int
    low: int
    high: int


@dataclass(frozen=True)
class Sparse:
    """What a sparse message holds: stretches [start, stop) sent whole, and the entries chosen from the others."""

    whole: tuple[tuple[int, int], ...]
    chosen: tuple[Chosen, ...]

    @property
    def num_whole(self) -> int:
        return sum(stop - start for start, stop in self.whole)

    @property
    def capacity(self) -> int:
        """The most entries a message has place for."""
        return sum(each.high for each in self.chosen)

    def sections(self, bucket: Bucket) -> Sections:
        """Counts by place block (int32), values (whole stretches first), places (int16)."""
        counts = -(-length(bucket) // PLACE_BLOCK) if self.chosen else 0
        values = Section(self.num_whole + self.capacity, bucket.element_bytes)
        return lay([Section(counts, 4), values, Section(self.capacity, 2)])


def sparse(coding: Coding, bucket: Bucket) -> Sparse:
    """What is chosen from a bucket: by topk from all of it, by dct from each parameter that is large enough."""
    if coding.kind == "topk":
        num_elements = length(bucket)
        count = kept(num_elements, coding.density)
        if count == num_elements:
            return Sparse(((0, num_elements),), ())
        return Sparse((), (Chosen(0, num_elements, count, count, count),))
    whole: list[tuple[int, int]] = []
    chosen = []
    for slot in bucket.slots:
        num_elements = slot.stop - slot.start
        count = kept(num_elements, coding.density)
        if num_elements >= WHOLE_BELOW and count < num_elements:
            low, high = math.floor(count * BAND_LOW), min(num_elements, math.ceil(count * BAND_HIGH))
            chosen.append(Chosen(slot.start, slot.stop, count, low, high))
        elif whole and whole[-1][1] == slot.start:
            whole[-1] = whole[-1][0], slot.stop
        else:
            whole.append((slot.start, slot.stop))
    return Sparse(tuple(whole), tuple(chosen))


class Matrix(NamedTuple):
    """A parameter seen as [rows, columns], and where its two factors begin, in elements."""

    slot: int
    start: int
    rows: int
    columns: int
    left: int
    right: int


@dataclass(frozen=True)
class LowRank:
    """What powersgd does with a bucket: matrices as products of factors, the rest whole."""

    matrices: tuple[Matrix, ...]
    whole: tuple[tuple[int, int], ...]
    num_left: int
    num_right: int

    @property
    def num_whole(self) -> int:
        return sum(stop - start for start, stop in self.whole)


def factor(bucket: Bucket, shapes: Shapes, rank: int) -> LowRank:
    """Which parameters become factors: those whose factors are smaller than they are, (rows + columns)·rank < size."""
    matrices: list[Matrix] = []
    whole: list[tuple[int, int]] = []
    left = right = 0
    for number, (slot, shape) in enumerate(zip(bucket.slots, shapes, strict=True)):
        rows = shape[0] if shape else 1
        columns = (slot.stop - slot.start) // rows
        if (rows + columns) * rank < rows * columns:
            matrices.append(Matrix(number, slot.start, rows, columns, left, right))
            left, right = left + rows * rank, right + columns * rank
        elif whole and whole[-1][1] == slot.start:
            whole[-1] = whole[-1][0], slot.stop
        else:
            whole.append((slot.start, slot.stop))
    return LowRank(tuple(matrices), tuple(whole), left, right)
