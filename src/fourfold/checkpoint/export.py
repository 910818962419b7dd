"""Export: a checkpoint's weights in a form that others read.

safetensors  one file of the weights under the model's own names; `init=FILE` reads it too
hf           a folder that transformers' `from_pretrained` loads
dcp          a folder in the format of torch.distributed.checkpoint
Law: what is exported appears under its name when it is complete. Nothing of a run is executed, nor changed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fourfold.checkpoint.pretrained_files import CONFIG_FILE, PRETRAINED_DIR
from fourfold.checkpoint.restore import CheckpointReader, exported_tensors, write_weights
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
    from fourfold.checkpoint.dcp_export import write_dcp

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
