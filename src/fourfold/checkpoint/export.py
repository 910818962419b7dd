"""Export: a checkpoint's weights in a form that others read.

safetensors  one file of the weights under the model's own names; `init=FILE` reads it too
hf           a folder that transformers' `from_pretrained` loads
dcp          a folder in the format of torch.distributed.checkpoint
Law: what is exported appears under its name when it is complete. Nothing of a run is executed, nor changed.

Law: torch writes it, and nothing in Fourfold reads it: its metadata file is a pickle. Each tensor is read once, when it
is written; the whole model is in memory at most once, since torch may keep what it has written.
"""

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from fourfold.checkpoint.pretrained_files import CONFIG_FILE, PRETRAINED_DIR
from fourfold.checkpoint.restore import CheckpointReader, ExportedTensor, exported_tensors, write_weights
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.plan.decode import DecodeError, from_json, read_bounded
from fourfold.words.errors import CheckpointError, Problem

MAX_CONFIG_BYTES = 2**26  # the names of many classes
WEIGHTS_FILE = "model.safetensors"  # the name that from_pretrained looks for


def export_weights(folder: Path, target: Path, *, ema: bool = False) -> int:
    """Write a checkpoint's weights into one weights file; returns its size. Raises CheckpointError and OSError.

    `ema`: the averages, with the model's buffers. A tied weight is written under each of its names.
    """
    with CheckpointReader(folder) as reader, _staged(target) as staging:
        return write_weights(staging, exported_tensors(reader, ema=ema))


def export_dcp(folder: Path, target: Path, *, ema: bool = False) -> int:
    """Write a checkpoint's weights as `torch.distributed.checkpoint.save(model.state_dict())` would; returns the size.

    Raises CheckpointError and OSError.
    """

    with CheckpointReader(folder) as reader, _staged(target) as staging:
        tensors = exported_tensors(reader, ema=ema)
        staging.mkdir()
        return write_dcp(staging, tensors)


def export_pretrained(folder: Path, target: Path, *, ema: bool = False) -> int:
    """Write a folder that `from_pretrained` loads: weights, config, tokenizer; returns the size of the weights.

    A tied weight is written once, under the first of its names, as transformers does. Raises CheckpointError, and
    OSError.
    """
    source = folder.parent.parent / PRETRAINED_DIR
    config = read_config(source)
    with CheckpointReader(folder) as reader, _staged(target) as staging:
        tensors = exported_tensors(reader, ema=ema, with_aliases=False)
        floats = [each.dtype for each in tensors.values() if each.dtype.is_floating_point]
        if floats:  # training may have kept them in another precision than that of the model
            config["dtype"] = str(floats[0]).removeprefix("torch.")
        staging.mkdir()
        for path in source.iterdir():
            if path.is_file() and not path.is_symlink():
                shutil.copyfile(path, staging / path.name)
        (staging / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
        return write_weights(staging / WEIGHTS_FILE, tensors, metadata={"format": "pt"})


def read_config(source: Path) -> dict[str, Any]:
    """The config of a transformers model as it was saved with the run. Raises CheckpointError."""
    path = source / CONFIG_FILE
    try:
        return from_json(read_bounded(path, max_bytes=MAX_CONFIG_BYTES), dict[str, Any])
    except FileNotFoundError:
        need = "a run whose model is a transformers.PreTrainedModel: its config is saved when training begins"
        raise CheckpointError(Problem(f"no {path}", need, "--format safetensors")) from None
    except DecodeError as error:
        raise CheckpointError(Problem(f"{path}: {error}", "the config of a model")) from None


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A path to write to; what is there at the end gets the target's name, or is removed after an error."""
    with temporary_folder(target.parent) as folder:
        yield folder / target.name
        os.rename(folder / target.name, target)


# ---- DCP export: a checkpoint's weights in the format of torch.distributed.checkpoint, for others to read -----------

SINGLE_PROCESS = "torch.distributed is disabled, unavailable or uninitialized"


class _StreamingPlanner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each one when it is written."""

    def __init__(self, tensors: Mapping[str, ExportedTensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: Any) -> Tensor:
        return self._tensors[index.fqn].read()


def write_dcp(folder: Path, tensors: Mapping[str, ExportedTensor]) -> int:
    """Write tensors into a folder, under their names; returns the bytes of the files. Raises OSError."""
    plan = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    # One thread: several would each hold a tensor.
    writer = FileSystemWriter(folder, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SINGLE_PROCESS)  # a single process is what is wanted
        try:
            save(plan, storage_writer=writer, planner=_StreamingPlanner(tensors), no_dist=True)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            raise (causes[0] if len(causes) == 1 else error) from None
    return sum(path.stat().st_size for path in folder.iterdir())
