"""DCP export: a checkpoint's weights in the format of torch.distributed.checkpoint, for others to read.

Law: torch writes it, and nothing in Fourfold reads it: its metadata file is a pickle. Each tensor is read once, when it
is written; the whole model is in memory at most once, since torch may keep what it has written.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from fourfold.checkpoint.restore import ExportedTensor

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
