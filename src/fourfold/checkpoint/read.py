"""Read: boxes of a checkpoint's tensors, from the files of any mesh.

Law: a box is assembled from all files that hold a part of it, so the mesh that reads need not be the one that wrote.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.checkpoint.manifest_file import read_manifest
from fourfold.checkpoint.write import TORCH_DTYPES
from fourfold.plan.checkpoint_boxes import StoredBox, intersection, relative_slices
from fourfold.plan.checkpoint_manifest import Manifest, TensorEntry
from fourfold.words.box import Box
from fourfold.words.errors import CheckpointError, Problem


class CheckpointReader(contextlib.ExitStack):
    """A verified checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.manifest: Manifest = read_manifest(folder)
        self._folder = folder
        self._open_files: dict[str, Any] = {}

    def read_tensor(self, name: str, box: Box | None = None) -> Tensor:
        """A copy of a global tensor, or of a box of it. Raises CheckpointError if a file contradicts the manifest."""
        name = self.manifest.aliases.get(name, name)
        entry = self.manifest.tensors[name]
        if box is None:
            return self._read_box(name, entry, Box((0,) * len(entry.dims), entry.dims)).view(entry.shape)
        return self._read_box(name, entry, box)

    def _read_box(self, name: str, entry: TensorEntry, wanted: Box) -> Tensor:
        if len(entry.stretches) == 1 and entry.stretches[0].box == wanted:
            return self._read_slice(name, entry, entry.stretches[0])  # as stored, without another copy
        result = torch.empty(wanted.lengths, dtype=TORCH_DTYPES[entry.dtype])
        for stored in entry.stretches:
            common = intersection(stored.box, wanted)
            if common is not None:
                slices = relative_slices(common, stored.box)
                result[relative_slices(common, wanted)] = self._read_slice(name, entry, stored, slices)
        return result

    def _read_slice(self, name: str, entry: TensorEntry, stored: StoredBox, slices: tuple[slice, ...] = ()) -> Tensor:
        """What one file holds of a tensor, or `slices` of it."""
        path = self._folder / stored.file
        try:
            if stored.file not in self._open_files:
                self._open_files[stored.file] = self.enter_context(safe_open(path, framework="pt"))
            file = self._open_files[stored.file]
            view = file.get_slice(name)
            if tuple(view.get_shape()) != stored.lengths or view.get_dtype() != entry.dtype:
                got = f"{path}: {name} is {view.get_dtype()} {view.get_shape()}"
                raise CheckpointError(Problem(got, f"{entry.dtype} {list(stored.lengths)}, as the manifest says"))
            return view[slices] if slices else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(Problem(f"{path}: {error}", "a safetensors file")) from None
