"""Origins: which mean of a loss the call of a loss function is.

place  where in the code it is called, as one number that is the same on all ranks
head   the parameter that its scores were made with last, by its place in the model
Law: parts of a batch whose means have other origins are parts of no one mean: a batch of one task on one rank, and of
another task on the next. Several means made on one line, with the same head, cannot be told apart.
"""

import functools
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FRAMES = 48  # that are looked at
STEPS = 48  # of autograd, from a loss back to a parameter
TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parent.parent)
USER = "user"
_owners: dict[str, str] = {}
NOBODY = -1
PARAMETER = "torch::autograd::AccumulateGrad"


def place() -> int:
    """Of the call that is being made: by the frames of the user's code, up to our own."""
    frame, found, is_inside = sys._getframe(1), 0, False
    for _ in range(FRAMES):
        if frame is None:
            break
        code = frame.f_code
        owner = _owners.get(code.co_filename) or _owner(code.co_filename)
        if owner == USER:
            is_inside = True
            found = (found * 31 + code.co_firstlineno * 65537 + frame.f_lasti) & 0xFFFFFFFF
        elif is_inside and owner == OURS:
            break
        frame = frame.f_back
    return found


def _owner(filename: str) -> str:
    owner = next((folder for folder in (OURS, TORCH) if filename.startswith(folder)), USER)
    _owners[filename] = owner
    return owner


class Heads:
    """The parameters of a model, by their place in it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def know(self, model: nn.Module) -> None:
        """Look at the parameters, the first time."""
        if not self._places:
            self._places = {id(p): index for index, p in enumerate(model.parameters())}

    def of(self, value: Tensor) -> int:
        """The first parameter that autograd comes to from a loss, always by the first way."""
        node: Any = value.grad_fn
        for _ in range(STEPS):
            if node is None:
                return NOBODY
            if node.name() == PARAMETER:
                return self._places.get(id(node.variable), NOBODY)
            node = next((behind for behind, _ in node.next_functions if behind is not None), None)
        return NOBODY


@functools.cache
def signature(*origins: tuple[str, int, int]) -> float:
    """A number from 1 to 2 that is another one for other origins: function, place and head of each mean."""
    return 1.0 + zlib.crc32(repr(origins).encode()) / 2**32
