"""Checkpoints of `torch.utils.checkpoint`: whether this thread runs inside one.

Law: found from the calls that this thread is in. A checkpoint leaves no other trace in what runs inside it.
"""

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.checkpoint import CheckpointFunction, checkpoint


def is_in_checkpoint() -> bool:
    """Whether this thread runs the first forward of a checkpoint, of either kind."""
    return current_checkpoint() is not None


def current_checkpoint() -> FrameType | None:
    """The call of the innermost checkpoint whose first forward this thread runs."""
    return _call_of(checkpoint)


def is_in_reentrant_checkpoint() -> bool:
    """Whether this thread runs the first forward of a checkpoint with `use_reentrant=True`."""
    return _call_of(CheckpointFunction.forward) is not None


def is_in_reentrant_backward() -> bool:
    """Whether this thread runs the backward of such a checkpoint, which runs within another one."""
    return _call_of(CheckpointFunction.backward) is not None


def _call_of(function: Callable[..., Any]) -> FrameType | None:
    frame, code = inspect.currentframe(), inspect.unwrap(function).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
