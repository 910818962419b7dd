"""Pretrained files: what `from_pretrained` needs of a transformers model besides its weights, saved while it trains.

    FOLDER/pretrained/config.json, generation_config.json, and the files of the tokenizer

Law: they are data. They are written while the model is there, so that an export needs neither the task's code nor
transformers, and makes no object of what a file says.
"""

import copy
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import nn

from fourfold.words.errors import os_error_text

PRETRAINED_DIR = "pretrained"
CONFIG_FILE = "config.json"
NEW, OLD = f".{PRETRAINED_DIR}-new", f".{PRETRAINED_DIR}-old"


def save_pretrained_files(folder: Path, model: nn.Module, tokenizer: Any = None) -> str:
    """Write them into a run's folder; nothing for other models. Returns why they could not be written, or "".

    Only rank 0 calls it. A tokenizer is any object with `save_pretrained(folder)`.
    """
    if not is_pretrained_model(model):
        return ""
    new, old, target = (folder / name for name in (NEW, OLD, PRETRAINED_DIR))
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        _write_files(new, model, tokenizer)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # transformers refuses some configs with these
        text = os_error_text(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
        return f"{target} could not be written: {text}; fourfold checkpoint export --format hf will miss it"
    return ""


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers; does not import it."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _write_files(folder: Path, model: Any, tokenizer: Any) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
