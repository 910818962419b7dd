"""Write: one rank's file of a checkpoint, from a copy in memory to the disk.

live tensor  a tensor in the memory that training uses
snapshot     a copy of this rank's stored boxes, end to end in one buffer that is allocated once
file         a safetensors file: a header, then the buffer
Law: a file is written only from a snapshot, so training may go on while it is written.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from fourfold.parts import memory
from fourfold.plan.checkpoint_boxes import ELEMENT_BYTES, GlobalTensor, StoredBox
from fourfold.plan.checkpoint_manifest import FileEntry
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


class LiveTensor(NamedTuple):
    """A global tensor, and the flat segments of memory that hold it, in order: all of it, or this rank's shard.

    `offset`: the first element that the segments hold.
    """

    tensor: GlobalTensor
    segments: Sequence[Tensor]
    offset: int = 0


def make_live_tensor(
    title: str, segments: Sequence[Tensor], shape: Sequence[int], *, is_unsharded: bool = False
) -> LiveTensor:
    """A tensor that this rank holds all of. Raises CheckpointError for a dtype that safetensors does not have."""
    dtype = SAFETENSORS_DTYPES.get(segments[0].dtype)
    if dtype is None:
        raise CheckpointError(Problem(f"{title} is of {segments[0].dtype}", "a dtype of the safetensors format"))
    return LiveTensor(GlobalTensor(title, dtype, tuple(shape), is_unsharded), segments)


class Snapshot:
    """This rank's stored boxes of some tensors, in one buffer."""

    def __init__(
        self, tensors: Sequence[GlobalTensor], stored_boxes: Mapping[str, Sequence[StoredBox]], file: str
    ) -> None:
        own = [(t, box) for t in tensors for box in stored_boxes[t.name] if box.file == file]
        # Wide elements first: then each tensor begins at a multiple of its element size.
        own.sort(key=lambda pair: -ELEMENT_BYTES[pair[0].dtype])
        self._ranges: dict[str, tuple[int, int]] = {}
        """By title: the elements [start, stop) of the flattened tensor that the box holds."""
        header, offset, views = {}, 0, []
        for tensor, box in own:
            count = math.prod(box.lengths)
            row = 1 if tensor.is_flat else math.prod(tensor.shape[1:])
            first = box.offsets[0] * row if box.offsets else 0
            self._ranges[tensor.name] = first, first + count
            stop = offset + count * ELEMENT_BYTES[tensor.dtype]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": box.lengths, "data_offsets": (offset, stop)}
            views.append((tensor, offset, stop))
            offset = stop
        self.buffer = memory.allocate_private(offset, torch.uint8, torch.device("cpu"))
        self._views = {t.name: self.buffer[a:b].view(TORCH_DTYPES[t.dtype]) for t, a, b in views}
        self.header = _safetensors_header(header)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.buffer.numel()

    @torch.no_grad()
    def capture(self, live_tensors: Sequence[LiveTensor]) -> None:
        """Copy the tensors' elements that belong to this rank's boxes into the buffer."""
        for tensor, segments, offset in live_tensors:
            if tensor.name in self._ranges:
                start, stop = self._ranges[tensor.name]
                _copy_range(segments, start - offset, stop - offset, out=self._views[tensor.name])


def _copy_range(segments: Sequence[Tensor], start: int, stop: int, *, out: Tensor) -> None:
    """Copy elements [start, stop) of consecutive flat segments."""
    offset = 0
    for segment in segments:
        low, high = max(start, offset), min(stop, offset + segment.numel())
        if low < high:
            out[low - start : high - start].copy_(segment[low - offset : high - offset])
        offset += segment.numel()


def _safetensors_header(tensors: Mapping[str, object]) -> bytes:
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, chunks: Sequence[bytes | memoryview]) -> FileEntry:
    """Write a new file; it is on the disk when this returns. Its space is reserved first. Raises OSError."""
    num_bytes = sum(len(chunk) for chunk in chunks)
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
    return write_file(path, [snapshot.header, memoryview(snapshot.buffer.numpy().data)])
