"""Write: one rank's piece of a checkpoint, from memory of its own to the disk.

snapshot  the rank's stretches, end to end in one buffer that is allocated once
piece     a safetensors file: a header, then the buffer as it lies
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
    """A global tensor, and the flat stretches in which it lies in memory, in order; `first` is their first element.

    All of the tensor lies there, or this rank's share of it.
    """

    tensor: GlobalTensor
    segments: Sequence[Tensor]
    offset: int = 0


def make_live_tensor(name: str, segments: Sequence[Tensor], shape: Sequence[int], *, whole: bool = False) -> LiveTensor:
    """Raises CheckpointError for a dtype that safetensors does not know."""
    dtype = SAFETENSORS_DTYPES.get(segments[0].dtype)
    if dtype is None:
        raise CheckpointError(Problem(f"{name} is of {segments[0].dtype}", "a dtype of the safetensors format"))
    return LiveTensor(GlobalTensor(name, dtype, tuple(shape), whole), segments)


class Snapshot:
    """This rank's stretches of some tensors, in one buffer."""

    def __init__(
        self, tensors: Sequence[GlobalTensor], stretches: Mapping[str, Sequence[StoredBox]], file: str
    ) -> None:
        mine = [(t, s) for t in tensors for s in stretches[t.name] if s.file == file]
        # Wide elements first: then each lies at a multiple of its size.
        mine.sort(key=lambda pair: -ELEMENT_BYTES[pair[0].dtype])
        self._ranges: dict[str, tuple[int, int]] = {}
        header, offset, views = {}, 0, []
        for tensor, stretch in mine:
            width = ELEMENT_BYTES[tensor.dtype]
            count = math.prod(stretch.lengths)
            row = 1 if tensor.is_flat else math.prod(tensor.shape[1:])
            first = stretch.offsets[0] * row if stretch.offsets else 0
            self._ranges[tensor.name] = first, first + count
            stop = offset + count * width
            header[tensor.name] = {"dtype": tensor.dtype, "shape": stretch.lengths, "data_offsets": (offset, stop)}
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
    def capture(self, tensors: Sequence[LiveTensor]) -> None:
        """Copy what this rank writes."""
        for tensor, parts, first in tensors:
            if tensor.name in self._ranges:
                start, stop = self._ranges[tensor.name]
                _copy_range(parts, start - first, stop - first, out=self._views[tensor.name])


def _copy_range(parts: Sequence[Tensor], start: int, stop: int, *, out: Tensor) -> None:
    """Elements [start, stop) of consecutive flat parts."""
    place = 0
    for part in parts:
        low, high = max(start, place), min(stop, place + part.numel())
        if low < high:
            out[low - start : high - start].copy_(part[low - place : high - place])
        place += part.numel()


def _safetensors_header(tensors: Mapping[str, object]) -> bytes:
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, chunks: Sequence[bytes | memoryview]) -> FileEntry:
    """A new file of these bytes, on the disk when this returns. Its room is reserved first. Raises OSError."""
    num_bytes = sum(len(chunk) for chunk in chunks)
    digest = xxhash.xxh3_128()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, num_bytes)
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK_BYTES):
                part = view[start : start + CHUNK_BYTES]
                digest.update(part)
                while part:
                    part = part[os.write(handle, part) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry(num_bytes, digest.hexdigest())


def write_snapshot(path: Path, snapshot: Snapshot) -> FileEntry:
    """The piece of a snapshot. Raises OSError."""
    return write_file(path, [snapshot.header, memoryview(snapshot.buffer.numpy().data)])
