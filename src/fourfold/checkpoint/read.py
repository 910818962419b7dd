"""Read: boxes of a checkpoint's tensors, whoever wrote them; and plain files of weights.

Law: a box is put together from whatever pieces it lies in, so another mesh reads the same files.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.checkpoint.manifest_file import read_manifest
from fourfold.checkpoint.write import TORCH_DTYPES
from fourfold.plan.checkpoint_boxes import Box, intersection, relative_slices
from fourfold.plan.checkpoint_manifest import Manifest, TensorEntry
from fourfold.words.errors import CheckpointError, Problem


class CheckpointReader(contextlib.ExitStack):
    """A verified checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.manifest: Manifest = read_manifest(folder)
        self._folder = folder
        self._open_files: dict[str, Any] = {}

    def read_tensor(self, name: str, box: Box | None = None) -> Tensor:
        """A global tensor, or a box of it: a copy. Raises CheckpointError where a piece is not as the manifest says."""
        entry = self.manifest.tensors[self.manifest.aliases.get(name, name)]
        if box is None:
            return self._read_box(name, entry, Box((0,) * len(entry.dims), entry.dims)).view(entry.shape)
        return self._read_box(name, entry, box)

    def _read_box(self, name: str, entry: TensorEntry, wanted: Box) -> Tensor:
        if len(entry.stretches) == 1 and entry.stretches[0].box == wanted:
            return self._read_slice(name, entry, entry.stretches[0].file, ())  # as it lies, without another copy
        result = torch.empty(wanted.lengths, dtype=TORCH_DTYPES[entry.dtype])
        for stretch in entry.stretches:
            common = intersection(stretch.box, wanted)
            if common is not None:
                result[relative_slices(common, wanted)] = self._read_slice(
                    name, entry, stretch.file, relative_slices(common, stretch.box)
                )
        return result

    def _read_slice(self, name: str, entry: TensorEntry, file: str, place: tuple[slice, ...]) -> Tensor:
        name = self.manifest.aliases.get(name, name)
        (stretch,) = (s for s in entry.stretches if s.file == file)
        try:
            if file not in self._open_files:
                self._open_files[file] = self.enter_context(safe_open(self._folder / file, framework="pt"))
            view = self._open_files[file].get_slice(name)
            if tuple(view.get_shape()) != stretch.lengths or view.get_dtype() != entry.dtype:
                got = f"{self._folder / file}: {name} is {view.get_dtype()} {view.get_shape()}"
                raise CheckpointError(Problem(got, f"{entry.dtype} {list(stretch.lengths)}, as the manifest says"))
            return view[place] if place else self._open_files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(Problem(f"{self._folder / file}: {error}", "a safetensors file")) from None
