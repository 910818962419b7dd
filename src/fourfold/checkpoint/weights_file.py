"""Weights files: plain safetensors files of a model's weights, under the model's own names.

Law: such a file loads with any library, and one from any library loads here if its names, shapes and dtypes fit.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fourfold.checkpoint.read import CheckpointReader
from fourfold.checkpoint.write import TORCH_DTYPES, Holders, Snapshot, make_live_tensor, write_snapshot
from fourfold.plan.checkpoint_boxes import shard_file_name
from fourfold.plan.checkpoint_manifest import TensorKey, TensorKind
from fourfold.step.state_validation import tied_problems
from fourfold.words.errors import CheckpointError, Problem


def load_weights_file(model: nn.Module, path: Path) -> None:
    """Load the weights in a file into a model. Raises CheckpointError with everything that does not fit."""
    with _open_weights_file(path) as file:
        check_weights_file(model, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    state = model.state_dict(keep_vars=True)
    if problems := tied_problems(state, tensors):
        raise CheckpointError(problems, where=str(path))
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(tensors[name])


def check_weights_file(model: nn.Module, path: Path) -> None:
    """Raise CheckpointError unless a file holds this model's weights, by its header; the weights are not read."""
    with _open_weights_file(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
        dtypes = {name: each.get_dtype() for name, each in slices.items()}
    state = model.state_dict()
    problems = shape_problems({name: tuple(value.shape) for name, value in state.items()}, shapes)
    problems += dtype_problems({name: value.dtype for name, value in state.items()}, dtypes)
    if problems:
        raise CheckpointError(problems, where=str(path))


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


@contextlib.contextmanager
def _open_weights_file(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(Problem(f"{path}: {error}", "a safetensors file of weights")) from None


def export_weights(folder: Path, target: Path, *, ema: bool = False) -> int:
    """Write a checkpoint's weights into one weights file; returns its size. Raises CheckpointError.

    `ema`: the averages, with the model's buffers.
    """
    with CheckpointReader(folder) as reader:
        names = [*(each.name for each in reader.entries if each.kind is TensorKind.MODEL), *reader.manifest.aliases]
        averaged = {each.name for each in reader.entries if each.kind is TensorKind.EMA}
        if ema and not averaged:
            raise CheckpointError(Problem(f"{folder} has no averages", "a run with ema=…", "without --ema"))
        live_tensors = []
        for name in sorted(names):
            own_name = reader.manifest.aliases.get(name, name)
            tensor = reader.tensor(TensorKey(TensorKind.MODEL, name))
            source = reader.tensor(TensorKey(TensorKind.EMA, own_name)) if ema and own_name in averaged else tensor
            value = source.read_all().to(tensor.dtype).reshape(-1)
            key = TensorKey(TensorKind.MODEL, name)
            live_tensors.append(make_live_tensor(key, [value], tensor.shape, holders=Holders()))
        snapshot = Snapshot([each.held for each in live_tensors], shard_file_name(0), names=sorted(names))
        snapshot.capture(live_tensors)
    return write_snapshot(target, snapshot).num_bytes
