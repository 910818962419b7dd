"""Checkpoint boxes: which part of which tensor each file of a checkpoint holds.

global tensor  a tensor as the whole run sees it: name, dtype and shape, the same whatever the mesh
box            a part of a tensor: an offset and a length for every dim
stored box     a box, and the file it is in
Law: the stored boxes of a tensor tile it.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from fourfold.words.box import Box

FILE_NAME_PATTERN = re.compile(r"rank-[0-9]{3,6}\.safetensors")
# By the dtype names of the safetensors format.
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class GlobalTensor(NamedTuple):
    """A tensor as the whole run sees it.

    is_unsharded  it is not split: a buffer of the model, which rank 0 writes
    is_flat       it is split as if it had one dim, so a box may begin anywhere in a row
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_unsharded: bool = False
    is_flat: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class StoredBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)


def shard_file_name(rank: int) -> str:
    return f"rank-{rank:03d}.safetensors"


def assign_shards(tensors: Iterable[GlobalTensor], num_ranks: int) -> dict[str, tuple[StoredBox, ...]]:
    """The boxes of each tensor, by name. Every rank writes one file; files are of equal size to within about a row.

    Tensors are split along dim 0 only, and only where one rank's part of all bytes ends within them.
    """
    tensors = list(tensors)
    total = sum(tensor.num_bytes for tensor in tensors if not tensor.is_unsharded)
    cuts = [total * rank // num_ranks for rank in range(num_ranks + 1)]
    result, start = {}, 0
    for tensor in tensors:
        if tensor.is_unsharded:
            result[tensor.name] = (_stored_rows(tensor, 0, tensor.shape[0] if tensor.shape else 1, rank=0),)
            continue
        stop = start + tensor.num_bytes
        rows = tensor.shape[0] if tensor.shape else 1
        row_bytes = tensor.num_bytes // rows if rows else 0
        bounds = [0, *(_nearest_row(cut - start, row_bytes, rows) for cut in cuts[1:-1]), rows]
        boxes = [
            _stored_rows(tensor, low, high, rank=rank)
            for rank, (low, high) in enumerate(itertools.pairwise(bounds))
            if low < high
        ]
        result[tensor.name] = tuple(boxes) or (_stored_rows(tensor, 0, rows, rank=0),)
        start = stop
    return result


def _nearest_row(offset_bytes: int, row_bytes: int, rows: int) -> int:
    """The row nearest to an offset in the tensor."""
    return min(max((offset_bytes + row_bytes // 2) // row_bytes, 0), rows) if row_bytes else 0


def _stored_rows(tensor: GlobalTensor, low: int, high: int, *, rank: int) -> StoredBox:
    if not tensor.shape:
        return StoredBox(shard_file_name(rank), (), ())
    return StoredBox(shard_file_name(rank), (low, *(0 for _ in tensor.shape[1:])), (high - low, *tensor.shape[1:]))


def intersection(a: Box, b: Box) -> Box | None:
    """The part that two boxes of one tensor have in common; None if it is empty."""
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True))
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def relative_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that select `box` from a tensor that holds `outer`."""
    return tuple(slice(x - y, x - y + n) for x, y, n in zip(box.offsets, outer.offsets, box.lengths, strict=True))


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box lies within a tensor of this shape."""
    if not len(box.offsets) == len(box.lengths) == len(shape):
        return False
    return all(x >= 0 and n >= 0 and x + n <= size for x, n, size in zip(box.offsets, box.lengths, shape, strict=True))


def is_tiling(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes that are inside a tensor of this shape cover it without overlap."""
    if not boxes or sum(math.prod(box.lengths) for box in boxes) != math.prod(shape):
        return False
    ordered = sorted(boxes)
    if all(
        box.lengths[1:] == tuple(shape[1:]) for box in ordered
    ):  # split along dim 0 only: comparing neighbours suffices
        return all(a.offsets[0] + a.lengths[0] <= b.offsets[0] for a, b in itertools.pairwise(ordered))
    return not any(intersection(a, b) for number, a in enumerate(boxes) for b in boxes[:number])
