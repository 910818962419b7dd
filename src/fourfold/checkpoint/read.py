"""Read: parts of a checkpoint's tensors, from the files of any mesh.

Law: a part is assembled from all files that hold some of it, so the mesh that reads need not be the one that wrote;
what lies outside of it is not read.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.checkpoint.manifest_file import read_manifest
from fourfold.checkpoint.write import TORCH_DTYPES
from fourfold.plan.checkpoint_boxes import Overlap, Part, Shape, flattened, overlaps, relative_slices, whole
from fourfold.plan.checkpoint_manifest import Manifest, StoredPart, TensorEntry, TensorKey, TensorKind
from fourfold.words.errors import CheckpointError, Problem


class CheckpointReader(contextlib.ExitStack):
    """A verified checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.manifest: Manifest = read_manifest(folder)
        self._folder = folder
        self._open_files: dict[str, Any] = {}
        self.entries = {entry.tensor: entry for entry in self.manifest.tensors}
        self.num_bytes = 0
        """How many bytes have been read."""

    def tensor(self, tensor: TensorKey) -> "StoredTensor":
        """A tensor of the checkpoint; a tied weight under each of its names."""
        if tensor.kind is TensorKind.MODEL:
            tensor = tensor._replace(name=self.manifest.aliases.get(tensor.name, tensor.name))
        return StoredTensor(self, self.entries[tensor])

    def read(self, entry: TensorEntry, wanted: Part) -> Tensor:
        """A part of a tensor, flat. Raises CheckpointError if a file contradicts the manifest.

        It is a copy, or memory of the file that must not be written.
        """
        if wanted.num_elements == entry.num_elements and len(entry.parts) == 1 and entry.parts[0].is_whole:
            return self._slice(entry, entry.parts[0]).reshape(-1)  # as it is stored, and most tensors are read
        result: Tensor | None = None
        for stored in entry.parts:
            for overlap in _overlaps(entry, stored, wanted):
                found = self._read_overlap(entry, stored, overlap)
                if overlap.common.num_elements == wanted.num_elements:
                    return found.reshape(-1)  # without another copy
                if result is None:
                    result = torch.empty(wanted.num_elements, dtype=TORCH_DTYPES[entry.dtype])
                block = overlap.second
                target = result[block.start : block.start + block.box.num_elements].view(block.box.lengths)
                target[relative_slices(overlap.common, block.box)] = found
        return torch.empty(0, dtype=TORCH_DTYPES[entry.dtype]) if result is None else result

    def _read_overlap(self, entry: TensorEntry, stored: StoredPart, overlap: Overlap) -> Tensor:
        """The elements of a box that lies within a block of a stored part, in the box's shape."""
        block, common = overlap.first, overlap.common
        if stored.range is None:  # in its box's shape; a box has one block, itself
            return self._slice(entry, stored, relative_slices(common, block.box))
        if not common.offsets:
            return self._slice(entry, stored, (slice(0, 1),)).view(())
        # The rows that hold the box, which are consecutive elements; then the box's columns of them.
        row = math.prod(block.box.lengths[1:])
        first = common.offsets[0] - block.box.offsets[0]
        start, stop = (block.start + index * row for index in (first, first + common.lengths[0]))
        rows = self._slice(entry, stored, (slice(start, stop),)).view(common.lengths[0], *block.box.lengths[1:])
        columns = relative_slices(common, block.box)[1:]
        return rows[(slice(None), *columns)]

    def _slice(self, entry: TensorEntry, stored: StoredPart, slices: tuple[slice, ...] = ()) -> Tensor:
        """What one file holds of a tensor, or slices of it."""
        path = self._folder / stored.file
        try:
            if stored.file not in self._open_files:
                self._open_files[stored.file] = self.enter_context(safe_open(path, framework="pt"))
            file = self._open_files[stored.file]
            view = file.get_slice(stored.name)
            shape = stored.shape_in_file(entry.shape)
            if tuple(view.get_shape()) != shape or view.get_dtype() != entry.dtype:
                got = f"{path}: {stored.name} is {view.get_dtype()} {view.get_shape()}"
                raise CheckpointError(Problem(got, f"{entry.dtype} {list(shape)}, as the manifest says"))
            found = view[slices] if slices else file.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(Problem(f"{path}: {error}", "a safetensors file")) from None
        self.num_bytes += found.numel() * found.element_size()
        return found


def _overlaps(entry: TensorEntry, stored: StoredPart, wanted: Part) -> Iterator[Overlap]:
    """What a stored part has of a wanted one."""
    part = stored.part_of(entry.shape)
    if stored.range is not None and part.box == wanted.box:  # both in one dim, as it is in the file
        return overlaps(flattened(part), flattened(wanted))
    return overlaps(part, wanted)


class StoredTensor:
    """A `TensorReader` of a checkpoint's tensor."""

    def __init__(self, reader: CheckpointReader, entry: TensorEntry) -> None:
        self._reader, self._entry = reader, entry

    @property
    def shape(self) -> Shape:
        return self._entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self._entry.dtype]

    def read(self, start: int, stop: int) -> Tensor:
        box = whole(self._entry.shape).box
        return self._reader.read(self._entry, Part(box, start, stop))

    def read_all(self) -> Tensor:
        """All of it, in its shape."""
        return self._reader.read(self._entry, whole(self._entry.shape)).view(self._entry.shape)
