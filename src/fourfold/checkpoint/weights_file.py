"""Weights files: plain safetensors files of a model's weights."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fourfold.checkpoint.read import CheckpointReader
from fourfold.checkpoint.write import TORCH_DTYPES, Snapshot, make_live_tensor, write_snapshot
from fourfold.plan.checkpoint_boxes import assign_shards
from fourfold.step.state_validation import tied_problems
from fourfold.words.errors import CheckpointError, Problem


def load_weights_file(model: nn.Module, path: Path) -> None:
    """Put the weights of a plain safetensors file into a model. Raises CheckpointError with all that does not fit."""
    with _open_weights_file(path) as file:
        check_weights_file(model, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    own = model.state_dict(keep_vars=True)
    if problems := tied_problems(own, tensors):
        raise CheckpointError(problems, where=str(path))
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])


def check_weights_file(model: nn.Module, path: Path) -> None:
    """Raise CheckpointError unless a plain safetensors file holds this model's weights; they are not read."""
    with _open_weights_file(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        theirs = {name: tuple(each.get_shape()) for name, each in slices.items()}
        dtypes = {name: each.get_dtype() for name, each in slices.items()}
    ours = model.state_dict()
    problems = shape_problems({name: tuple(value.shape) for name, value in ours.items()}, theirs)
    problems += dtype_problems({name: value.dtype for name, value in ours.items()}, dtypes)
    if problems:
        raise CheckpointError(problems, where=str(path))


def shape_problems(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """What of a file does not fit what is there."""
    problems = [Problem(f"no {name}", f"shape {list(shape)}") for name, shape in ours.items() if name not in theirs]
    problems += [Problem(name, "only what the model has") for name in theirs if name not in ours]
    for name, shape in ours.items():
        if theirs.get(name, shape) != shape:
            problems.append(Problem(f"{name} of shape {list(theirs[name])}", f"shape {list(shape)}"))
    return problems


def dtype_problems(ours: Mapping[str, torch.dtype], theirs: Mapping[str, str]) -> list[Problem]:
    """Tensors of a file whose values the dtype that is there cannot hold, as complex numbers in real parameters."""
    problems = []
    for name, dtype in ours.items():
        found = TORCH_DTYPES.get(theirs.get(name, ""), dtype)
        if not torch.can_cast(found, dtype):
            got, need = (str(each).removeprefix("torch.") for each in (found, dtype))
            problems.append(Problem(f"{name} of {got}", f"numbers that fit into {need}"))
    return problems


@contextlib.contextmanager
def _open_weights_file(path: Path):
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(Problem(f"{path}: {error}", "a safetensors file of weights")) from None


def export_weights(folder: Path, target: Path, *, ema: bool = False) -> int:
    """Write a checkpoint's weights into one plain safetensors file; returns its size. Raises CheckpointError.

    Names are the model's own, so the file loads with any library. `ema`: the averages, with the model's buffers.
    """
    with CheckpointReader(folder) as reader:
        every = [*reader.manifest.tensors, *reader.manifest.aliases]
        averaged = {name.removeprefix("ema.") for name in every if name.startswith("ema.")}
        if ema and not averaged:
            raise CheckpointError(Problem(f"{folder} has no averages", "a run with ema=…", "without --ema"))
        tensors = []
        for name in sorted(name.removeprefix("model.") for name in every if name.startswith("model.")):
            of = reader.manifest.aliases.get(f"model.{name}", f"model.{name}").removeprefix("model.")
            value = reader.read_tensor(f"ema.{of}" if ema and of in averaged else f"model.{of}")
            value = value.to(TORCH_DTYPES[reader.manifest.tensors[f"model.{of}"].dtype])
            tensors.append(make_live_tensor(name, [value.reshape(-1)], value.shape))
    globals_ = [each.tensor for each in tensors]
    stretches = assign_shards(globals_, 1)
    snapshot = Snapshot(globals_, stretches, "rank-000.safetensors")
    snapshot.capture(tensors)
    return write_snapshot(target, snapshot).num_bytes
