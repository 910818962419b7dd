"""Read: parts of a checkpoint's tensors, from the files of any mesh.

Law: a part is assembled from all files that hold some of it, so the mesh that reads need not be the one that wrote;
what lies outside of it is not read.
"""

import contextlib
import copy
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.checkpoint.manifest_file import read_manifest
from fourfold.checkpoint.write import SAFETENSORS_DTYPES, TORCH_DTYPES
from fourfold.plan.checkpoint_boxes import Block, Overlap, Part, Shape, flattened, overlaps, relative_slices, whole
from fourfold.plan.checkpoint_manifest import Manifest, StoredPart, TensorEntry, TensorKey, TensorKind
from fourfold.torch_kit.tensor_reader import part_of
from fourfold.words.errors import CheckpointError, Problem
from fourfold.words.ranges import Box


class CheckpointReader(contextlib.ExitStack):
    """A verified checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.manifest: Manifest = read_manifest(folder)
        self.folder = folder
        self._open_files: dict[str, Any] = {}
        self.entries = {entry.tensor: entry for entry in self.manifest.tensors}
        self.num_bytes = 0
        """How many bytes have been used; the files are mapped, so about as many are read."""

    def without(self, names: Collection[str]) -> Self:
        """The same checkpoint without the tensors of these names, such as those of other stages."""
        if not names:
            return self
        reader, manifest = copy.copy(self), self.manifest
        reader.entries = {key: entry for key, entry in self.entries.items() if key.name not in names}
        reader.manifest = msgspec.structs.replace(
            manifest,
            aliases={name: other for name, other in manifest.aliases.items() if name not in names},
            scalars={name: values for name, values in manifest.scalars.items() if name not in names},
        )
        return reader

    def tensor(self, tensor: TensorKey) -> "StoredTensor":
        """A tensor of the checkpoint; a tied weight under each of its names."""
        if tensor.kind is TensorKind.MODEL:
            tensor = tensor._replace(name=self.manifest.aliases.get(tensor.name, tensor.name))
        return StoredTensor(self, self.entries[tensor])

    def read(self, entry: TensorEntry, wanted: Part) -> Tensor:
        """A part of a tensor, flat. Raises CheckpointError if a file contradicts the manifest.

        It is a copy, or memory of the file that must not be written.
        """
        if len(entry.parts) == 1 and entry.parts[0].is_whole and wanted.num_elements == entry.num_elements:
            found = self._file_tensor(entry, entry.parts[0]).view(-1)  # most tensors, in a tenth of the time
            self.num_bytes += found.numel() * found.element_size()
            return found
        result: Tensor | None = None
        for stored in entry.parts:
            for overlap in _overlaps(stored.part_of(entry.shape), wanted):
                found = _view(self._file_tensor(entry, stored).view(-1), overlap.first, overlap.common)
                self.num_bytes += found.numel() * found.element_size()
                if overlap.common.num_elements == wanted.num_elements:
                    return found.reshape(-1)
                if result is None:
                    result = torch.empty(wanted.num_elements, dtype=found.dtype)
                _view(result, overlap.second, overlap.common).copy_(found)
        return torch.empty(0, dtype=TORCH_DTYPES[entry.dtype]) if result is None else result

    def _file_tensor(self, entry: TensorEntry, stored: StoredPart) -> Tensor:
        """What one file holds of a tensor: mapped memory, which is read from the disk as it is used."""
        path = self.folder / stored.file
        try:
            if stored.file not in self._open_files:
                self._open_files[stored.file] = self.enter_context(safe_open(path, framework="pt"))
            found = self._open_files[stored.file].get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(Problem(f"{path}: {error}", "a safetensors file")) from None
        shape, dtype = stored.shape_in_file(entry.shape), SAFETENSORS_DTYPES.get(found.dtype)
        if tuple(found.shape) != shape or dtype != entry.dtype:
            got = f"{path}: {stored.name} is {dtype} {list(found.shape)}"
            raise CheckpointError(Problem(got, f"{entry.dtype} {list(shape)}, as the manifest says"))
        return found


def _overlaps(stored: Part, wanted: Part) -> Iterator[Overlap]:
    """What a stored part has of a wanted one; ranges of one box overlap in one range."""
    if stored.box == wanted.box:
        return overlaps(flattened(stored), flattened(wanted))
    return overlaps(stored, wanted)


def _view(part: Tensor, block: Block, box: Box) -> Tensor:
    """The elements of a box that lies within a block of a part, which is given flat."""
    elements = part[block.start : block.start + block.box.num_elements]
    return elements.view(block.box.lengths)[relative_slices(box, block.box)]


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

    def read_part(self, part: Part, shape: Shape) -> Tensor:
        if shape != self._entry.shape:  # saved flat
            return part_of(self._reader.read(self._entry, whole(self._entry.shape)).view(shape), part)
        return self._reader.read(self._entry, part)

    def read_all(self) -> Tensor:
        """All of it, in its shape."""
        return self._reader.read(self._entry, whole(self._entry.shape)).view(self._entry.shape)
