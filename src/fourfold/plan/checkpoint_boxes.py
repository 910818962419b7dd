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

FILE_NAME_PATTERN = re.compile(r"rank-[0-9]{3,6}\.safetensors")
# The dtypes of the safetensors format, by its own names.
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class GlobalTensor(NamedTuple):
    """A tensor as the whole run sees it; `whole`: it is not cut (the buffers, which rank 0 speaks for).

    `flat`: it is cut as if it had one dim, anywhere in its rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_unsharded: bool = False
    is_flat: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class Box(NamedTuple):
    """Part of a tensor."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class StoredBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)


def shard_file_name(rank: int) -> str:
    return f"rank-{rank:03d}.safetensors"


def assign_shards(tensors: Iterable[GlobalTensor], num_ranks: int) -> dict[str, tuple[StoredBox, ...]]:
    """Who writes what: the stretches of each tensor, one file a rank, equal in bytes to about a row.

    Tensors are cut along dim 0 only, and only where one rank's share ends within them.
    """
    every = list(tensors)
    total = sum(tensor.num_bytes for tensor in every if not tensor.is_unsharded)
    cuts = [total * rank // num_ranks for rank in range(num_ranks + 1)]
    result, start = {}, 0
    for tensor in every:
        if tensor.is_unsharded:
            result[tensor.name] = (_stored_rows(tensor, 0, tensor.shape[0] if tensor.shape else 1, rank=0),)
            continue
        stop = start + tensor.num_bytes
        rows = tensor.shape[0] if tensor.shape else 1
        row_bytes = tensor.num_bytes // rows if rows else 0
        bounds = [0, *(_nearest_row(cut - start, row_bytes, rows) for cut in cuts[1:-1]), rows]
        stretches = [
            _stored_rows(tensor, low, high, rank=rank)
            for rank, (low, high) in enumerate(itertools.pairwise(bounds))
            if low < high
        ]
        result[tensor.name] = tuple(stretches) or (_stored_rows(tensor, 0, rows, rank=0),)
        start = stop
    return result


def _nearest_row(offset_bytes: int, row_bytes: int, rows: int) -> int:
    """The row nearest to a place in the tensor."""
    return min(max((offset_bytes + row_bytes // 2) // row_bytes, 0), rows) if row_bytes else 0


def _stored_rows(tensor: GlobalTensor, low: int, high: int, *, rank: int) -> StoredBox:
    if not tensor.shape:
        return StoredBox(shard_file_name(rank), (), ())
    return StoredBox(shard_file_name(rank), (low, *(0 for _ in tensor.shape[1:])), (high - low, *tensor.shape[1:]))


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None where that is nothing."""
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True))
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def relative_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """The box as slices of a tensor that holds `outer`."""
    return tuple(slice(x - y, x - y + n) for x, y, n in zip(box.offsets, outer.offsets, box.lengths, strict=True))


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    if not len(box.offsets) == len(box.lengths) == len(shape):
        return False
    return all(x >= 0 and n >= 0 and x + n <= size for x, n, size in zip(box.offsets, box.lengths, shape, strict=True))


def is_tiling(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    if not boxes or sum(math.prod(box.lengths) for box in boxes) != math.prod(shape):
        return False
    ordered = sorted(boxes)
    if all(box.lengths[1:] == tuple(shape[1:]) for box in ordered):  # cut along dim 0 only: neighbours suffice
        return all(a.offsets[0] + a.lengths[0] <= b.offsets[0] for a, b in itertools.pairwise(ordered))
    return not any(intersection(a, b) for number, a in enumerate(boxes) for b in boxes[:number])
