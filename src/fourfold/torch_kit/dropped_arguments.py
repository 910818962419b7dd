"""Dropped arguments: some torch functions do not pass all their arguments to function modes and tensor classes.

Law: `func(*args, **restore_arguments(func, args, kwargs))` is the call that the user made.

Source: the calls of `handle_torch_function` in torch 2.13; a test compares them with this list.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DROPPED_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.l1_loss: ("weight",),
    torch.chain_matmul: ("out",),
    Tensor.dim_order: ("ambiguity_check",),
}


def restore_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call that a function mode or a tensor class has got, as the caller gave them."""
    names = DROPPED_ARGUMENTS.get(func)
    if names is None:
        return kwargs
    code = func.__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return kwargs
    positional = code.co_varnames[: min(len(args), code.co_argcount)]
    given = {*kwargs, *positional}
    return kwargs | {name: frame.f_locals[name] for name in names if name in frame.f_locals and name not in given}
