"""Weights files: plain safetensors files of a model's weights, under the model's own names.

Law: such a file loads with any library, and one from any library loads here if its names, shapes and dtypes fit.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.checkpoint.read import CheckpointReader, StoredTensor
from fourfold.checkpoint.write import SAFETENSORS_DTYPES, TORCH_DTYPES, safetensors_header, write_file
from fourfold.plan.checkpoint_manifest import TensorKey, TensorKind
from fourfold.words.errors import CheckpointError, Problem


def shape_problems(
    model_shapes: Mapping[str, tuple[int, ...]], file_shapes: Mapping[str, tuple[int, ...]]
) -> list[Problem]:
    """Names and shapes in a file that are not the model's."""
    missing = [name for name in model_shapes if name not in file_shapes]
    problems = [Problem(f"no {name}", f"shape {list(model_shapes[name])}") for name in missing]
    problems += [Problem(name, "only what the model has") for name in file_shapes if name not in model_shapes]
    for name, shape in model_shapes.items():
        if file_shapes.get(name, shape) != shape:
            problems.append(Problem(f"{name} of shape {list(file_shapes[name])}", f"shape {list(shape)}"))
    return problems


def dtype_problems(model_dtypes: Mapping[str, torch.dtype], file_dtypes: Mapping[str, str]) -> list[Problem]:
    """Tensors of a file whose values the model's dtype cannot hold, such as complex numbers in real parameters."""
    problems = []
    for name, dtype in model_dtypes.items():
        file_dtype = TORCH_DTYPES.get(file_dtypes.get(name, ""), dtype)
        if not torch.can_cast(file_dtype, dtype):
            got, need = (str(each).removeprefix("torch.") for each in (file_dtype, dtype))
            problems.append(Problem(f"{name} of {got}", f"numbers that fit into {need}"))
    return problems


class ExportedTensor(NamedTuple):
    """A tensor to export, which is read when it is written; `dtype` is that of the model."""

    source: StoredTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """All of it, in its shape."""
        return self.source.read_all().to(self.dtype)


def exported_tensors(
    reader: CheckpointReader, *, ema: bool = False, with_aliases: bool = True
) -> dict[str, ExportedTensor]:
    """A checkpoint's weights and buffers by name; none is read here. Raises CheckpointError.

    ema           the averages, with the model's buffers
    with_aliases  a tied weight has each of its names, else the first
    """
    names = [each.name for each in reader.entries if each.kind is TensorKind.MODEL]
    averaged = {each.name for each in reader.entries if each.kind is TensorKind.EMA}
    if ema and not averaged:
        raise CheckpointError(Problem(f"{reader.folder} has no averages", "a run with ema=…", "without --ema"))
    tensors = {}
    for name in sorted([*names, *reader.manifest.aliases] if with_aliases else names):
        own_name = reader.manifest.aliases.get(name, name)
        kind = TensorKind.EMA if ema and own_name in averaged else TensorKind.MODEL
        dtype = reader.tensor(TensorKey(TensorKind.MODEL, own_name)).dtype
        tensors[name] = ExportedTensor(reader.tensor(TensorKey(kind, own_name)), dtype)
    return tensors


def write_weights(
    path: Path, tensors: Mapping[str, ExportedTensor], *, metadata: Mapping[str, str] | None = None
) -> int:
    """Write a safetensors file, one tensor in memory at a time; returns its size. Raises OSError."""
    # Wide elements first: then each tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        each = tensors[name]
        end = offset + each.num_bytes
        header[name] = {"dtype": SAFETENSORS_DTYPES[each.dtype], "shape": each.shape, "data_offsets": (offset, end)}
        offset = end
    head = safetensors_header(header)
    chunks = itertools.chain([head], (_bytes_of(tensors[name].read()) for name in order))
    return write_file(path, chunks, num_bytes=len(head) + offset).num_bytes


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
