"""Initial weights: a model that begins with the weights in files.

Law: with tp > 1 a rank reads its shards of the weights that are split, and no other bytes of them. A tied weight may
stand in the files under one of its names, or under all of them with the same values, which are compared. A tensor that
transformers' `from_pretrained` would read or skip without a word is read or skipped here too.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fourfold.checkpoint.weights_file import dtype_problems, shape_problems
from fourfold.step.initial_model import make_initial_model
from fourfold.torch_kit.deferred_init import InitialModel
from fourfold.torch_kit.weight_files import StoredWeights, WeightFiles
from fourfold.words.errors import CheckpointError, Problem

SKIPPED = r"rotary_emb\.inv_freq$"  # older files of many models; it is computed


def initial_model_of_files(
    make: Callable[[], nn.Module], path: Path, device: torch.device, *, defers: bool, is_log_rank: bool
) -> InitialModel:
    """What `make` makes, with the weights in a file or folder. Raises CheckpointError with all that does not fit.

    defers  the rank's part of a weight is read when it is cut
    """
    initial = make_initial_model(make, device, defers=defers, is_log_rank=is_log_rank)
    if not initial.weights.are_deferred:
        load_weights(initial.model, path)
        return initial
    files, state = WeightFiles(path), initial.model.state_dict(keep_vars=True)
    stored, parameters = _stored_names(initial.model, files), set(initial.model.parameters())
    with torch.no_grad():
        for name in stored:
            if state[name] not in parameters:
                state[name].copy_(files.read(stored[name]))
    names = {state[name]: each for name, each in stored.items() if state[name] in parameters}
    return InitialModel(initial.model, StoredWeights(files, names))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights in a file or folder into a model. Raises CheckpointError with everything that does not fit."""
    files = WeightFiles(path)
    stored, state = _stored_names(model, files), model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, each in stored.items():
            state[name].copy_(files.read(each))


def check_weights(model: nn.Module, path: Path) -> None:
    """Raise CheckpointError unless a file or folder holds this model's weights; the model may be on meta.

    Only headers are read, and both values of a tied weight that stands there twice.
    """
    _stored_names(model, WeightFiles(path))


def _stored_names(model: nn.Module, files: WeightFiles) -> dict[str, str]:
    """The name in the files of each weight and buffer. Raises CheckpointError with everything that does not fit."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    stored = _names_in_model(model, files.shapes, state)
    file_shapes = {name: files.shapes[each] for name, each in stored.items()}
    expected = {name: state[name] for name in _names_to_find(state, stored)}
    problems = shape_problems({name: tuple(value.shape) for name, value in expected.items()}, file_shapes)
    file_dtypes = {name: files.dtypes[each] for name, each in stored.items()}
    problems += dtype_problems({name: value.dtype for name, value in expected.items()}, file_dtypes)
    problems = problems or _tied_problems(state, stored, files)
    if problems:
        raise CheckpointError(problems, where=str(files.path))
    return stored


def _names_to_find(state: Mapping[str, Any], stored: Mapping[str, str]) -> list[str]:
    """The names of the model, of a tied weight those that the files have, or the first."""
    tied: dict[int, list[str]] = {}
    for name, value in state.items():
        tied.setdefault(id(value), []).append(name)
    return [each for names in tied.values() for each in ([n for n in names if n in stored] or names[:1])]


def _tied_problems(state: Mapping[str, Any], stored: Mapping[str, str], files: WeightFiles) -> list[Problem]:
    """Tied names with different values in the files: the last one would win."""
    problems, first = [], {}
    for name in [each for each in state if each in stored]:
        other = first.setdefault(id(state[name]), name)
        if other != name and not files.are_equal(stored[other], stored[name]):
            got = f"{other} and {name} with different values"
            problems.append(Problem(got, "the same values: the model ties them"))
    return problems


def _names_in_model(model: nn.Module, names: Iterable[str], own: Collection[str]) -> dict[str, str]:
    """The names of the tensors in files, by the name that each has in the model; without those that are skipped.

    own: the model's names. Files of a model without its head leave out a prefix, and older files have masks.
    """
    prefix = getattr(model, "base_model_prefix", "")
    patterns = [SKIPPED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())] if prefix else []
    found = {}
    for name in names:
        full = f"{prefix}.{name}"
        if name not in own and full in own:
            found[full] = name
        elif name in own or not any(re.search(pattern, name) for pattern in patterns):
            found[name] = name
    return found
