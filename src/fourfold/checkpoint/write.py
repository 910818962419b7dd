"""Write: one rank's file of a checkpoint, from a copy in memory to the disk.

live tensor  a part of a tensor in the memory that training uses
holders      the ranks that hold the same part: each writes an equal share of it
snapshot     a copy of what this rank writes, end to end in one buffer that is allocated once
file         a safetensors file: a header, then the buffer
Law: a file is written only from a snapshot, so training may go on while it is written.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from fourfold.axes.tensor.work.whole_tensors import row_views
from fourfold.plan.checkpoint_boxes import ELEMENT_BYTES, Part, Shape, blocks, divide_writing, relative_slices, whole
from fourfold.plan.checkpoint_manifest import FileEntry, StoredPart, TensorEntry, TensorKey
from fourfold.plan.shard_ranges import stored_ranges
from fourfold.plan.tensor_shard import TensorShard
from fourfold.torch_kit import memory
from fourfold.words.errors import CheckpointError, Problem

CHUNK_BYTES = 4 * 2**20
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same part of a tensor: this one is number `index` of `count`."""

    index: int = 0
    count: int = 1
    num_parts: int = 1
    """How many parts, or tensors like this one, other such groups of ranks hold: an estimate of all bytes."""


class HeldPart(NamedTuple):
    """A part of a tensor that this rank holds, as the whole run sees it."""

    tensor: TensorKey
    dtype: str
    shape: Shape
    part: Part
    holders: Holders


class LiveTensor(NamedTuple):
    """A part of a tensor, and the segments of memory that hold it, in order: each flat, or rows of elements."""

    held: HeldPart
    segments: Sequence[Tensor]


def make_live_tensor(
    tensor: TensorKey,
    segments: Sequence[Tensor],
    shape: Sequence[int],
    *,
    holders: Holders,
) -> LiveTensor:
    """All of a tensor. Raises CheckpointError for a dtype that safetensors lacks."""
    dtype = _safetensors_dtype(tensor, segments[0])
    return LiveTensor(HeldPart(tensor, dtype, tuple(shape), whole(tuple(shape)), holders), segments)


def make_live_parts(
    tensor: TensorKey, segments: Sequence[Tensor], shard: TensorShard, start: int, *, holders: Holders
) -> list[LiveTensor]:
    """What a rank is to store of a tensor of which it holds the elements of a shard from `start` on.

    `segments` are flat and consecutive. Raises CheckpointError for a dtype that safetensors lacks.
    """
    dtype = _safetensors_dtype(tensor, segments[0])
    parts: dict[int, Part] = {}
    views: dict[int, list[Tensor]] = {}
    for segment in segments:
        for piece, part, rows in stored_ranges(shard, start, start + segment.numel()):
            parts[piece] = parts.get(piece, part)._replace(stop=part.stop)
            views.setdefault(piece, []).extend(row_views(segment, rows))
        start += segment.numel()
    return [
        LiveTensor(HeldPart(tensor, dtype, shard.shape, part, holders), views[piece]) for piece, part in parts.items()
    ]


def _safetensors_dtype(tensor: TensorKey, values: Tensor) -> str:
    dtype = SAFETENSORS_DTYPES.get(values.dtype)
    if dtype is None:
        raise CheckpointError(Problem(f"{tensor.label} is of {values.dtype}", "a dtype of the safetensors format"))
    return dtype


def estimated_bytes(held: Sequence[HeldPart]) -> int:
    """The bytes that all ranks hold, where each holds as much as this one."""
    return sum(each.part.num_elements * ELEMENT_BYTES[each.dtype] * each.holders.num_parts for each in held)


class Snapshot:
    """What this rank writes of the parts it holds, in one buffer."""

    def __init__(self, held: Sequence[HeldPart], file: str) -> None:
        self.held = held
        self._ranges = _own_ranges(held)
        """By part that this rank writes: its index in `held`, and the elements [start, stop) of it."""
        unique_names = _unique_names([held[index].tensor.label for index in self._ranges])
        # Wide elements first: then each tensor begins at a multiple of its element size.
        order = sorted(self._ranges, key=lambda index: -ELEMENT_BYTES[held[index].dtype])
        stored = {
            index: _stored_part(held[index], self._ranges[index], file, name)
            for index, name in zip(self._ranges, unique_names, strict=True)
        }
        header, offset, bounds = {}, 0, {}
        for index in order:
            start, stop = self._ranges[index]
            end = offset + (stop - start) * ELEMENT_BYTES[held[index].dtype]
            shape = stored[index].shape_in_file(held[index].shape)
            header[stored[index].name] = {"dtype": held[index].dtype, "shape": shape, "data_offsets": (offset, end)}
            bounds[index] = offset, end
            offset = end
        self.entries = tuple(_entry(held[index], stored[index]) for index in self._ranges)
        """What the file holds, as the manifest lists it."""
        self.buffer = memory.allocate_private(offset, torch.uint8, torch.device("cpu"))
        self._views = {i: self.buffer[a:b].view(TORCH_DTYPES[held[i].dtype]) for i, (a, b) in bounds.items()}
        self.header = safetensors_header(header)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.buffer.numel()

    @torch.no_grad()
    def capture(self, live_tensors: Sequence[LiveTensor]) -> None:
        """Copy what this rank writes into the buffer. `live_tensors` are the parts that the snapshot was made for."""
        for index, (start, stop) in self._ranges.items():
            _copy_range(live_tensors[index].segments, start, stop, out=self._views[index])


def _own_ranges(held: Sequence[HeldPart]) -> dict[int, tuple[int, int]]:
    """The parts that this rank writes, and which elements of each."""
    groups: dict[Holders, list[int]] = {}
    for index, each in enumerate(held):
        groups.setdefault(each.holders, []).append(index)
    ranges = {}
    for holders, indices in groups.items():
        sizes = [(held[index].part.num_elements, ELEMENT_BYTES[held[index].dtype]) for index in indices]
        shares = divide_writing(sizes, holders.index, holders.count)
        for index, (count, _), (start, stop) in zip(indices, sizes, shares, strict=True):
            if start < stop or (count == 0 and holders.index == 0):
                ranges[index] = start, stop
    return dict(sorted(ranges.items()))


def _unique_names(names: Sequence[str]) -> list[str]:
    """The names, with a number where one would come twice: a checkpoint may have several parts of a tensor."""
    result: dict[str, None] = {}
    for name in names:
        unique, number = name, 1
        while unique in result:
            number += 1
            unique = f"{name}#{number}"
        result[unique] = None
    return list(result)


def _stored_part(held: HeldPart, own: tuple[int, int], file: str, name: str) -> StoredPart:
    start, stop = (held.part.start + each for each in own)
    box = held.part.box
    is_box = Part(box, start, stop).is_box
    return StoredPart(file, name, None if box == whole(held.shape).box else box, None if is_box else (start, stop))


def _entry(held: HeldPart, stored: StoredPart) -> TensorEntry:
    kind, name, key, place = held.tensor
    return TensorEntry(kind, name, held.dtype, held.shape, (stored,), key, place)


def _copy_range(segments: Sequence[Tensor], start: int, stop: int, *, out: Tensor) -> None:
    """Copy elements [start, stop) of consecutive segments."""
    offset = 0
    for segment in segments:
        low, high = max(start, offset), min(stop, offset + segment.numel())
        everything = whole(tuple(segment.shape))
        for first, box in blocks(everything._replace(start=low - offset, stop=high - offset)):
            view = segment[relative_slices(box, everything.box)]
            out[low - start + first :][: view.numel()].view(view.shape).copy_(view)
        offset += segment.numel()


def safetensors_header(tensors: Mapping[str, object]) -> bytes:
    """The beginning of a safetensors file: its length, and dtype, shape and place of each tensor."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, chunks: Iterable[bytes | memoryview], *, num_bytes: int) -> FileEntry:
    """Write a new file; it is on the disk when this returns. Its space is reserved first. Raises OSError.

    `num_bytes`: the length of all chunks.
    """
    digest = xxhash.xxh3_128()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, num_bytes)
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK_BYTES):
                remaining = view[start : start + CHUNK_BYTES]
                digest.update(remaining)
                while remaining:
                    remaining = remaining[os.write(handle, remaining) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry(num_bytes, digest.hexdigest())


def write_snapshot(path: Path, snapshot: Snapshot) -> FileEntry:
    """Write a snapshot into a new safetensors file. Raises OSError."""
    chunks = [snapshot.header, memoryview(snapshot.buffer.numpy().data)]
    return write_file(path, chunks, num_bytes=snapshot.num_bytes)
