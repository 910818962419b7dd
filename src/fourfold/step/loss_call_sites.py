"""Origins: which mean of a loss the call of a loss function is.

place   where in the code it is called, as one number that is the same on all ranks
source  the output of the model that it is of, by its place among the outputs
Law: parts of a batch whose means have other origins are parts of no one mean: a batch of one task on one rank, and of
another task on the next. Means that one line makes of the same output, or within the model, cannot be told apart.
"""

import functools
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_FRAMES = 48  # that are looked at
MAX_GRAPH_STEPS = 48  # of autograd, from a loss back to an output
TORCH_DIR = str(Path(torch.__file__).parent)
PACKAGE_DIR = str(Path(__file__).parent.parent)
USER = "user"
_owner_of_file: dict[str, str] = {}
NO_OUTPUT = -1


def call_site() -> int:
    """Of the call that is being made: by the frames of the user's code, up to our own."""
    frame, found, is_inside = sys._getframe(1), 0, False
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        owner = _owner_of_file.get(code.co_filename) or _find_owner(code.co_filename)
        if owner == USER:
            is_inside = True
            found = (found * 31 + code.co_firstlineno * 65537 + frame.f_lasti) & 0xFFFFFFFF
        elif is_inside and owner == PACKAGE_DIR:
            break
        frame = frame.f_back
    return found


def _find_owner(filename: str) -> str:
    owner = next((folder for folder in (PACKAGE_DIR, TORCH_DIR) if filename.startswith(folder)), USER)
    _owner_of_file[filename] = owner
    return owner


class OutputIndex:
    """The outputs of a model, by their place among them."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        # Of one output nothing is to be told apart.
        self._index_of_node = {each.grad_fn: index for index, each in enumerate(outputs)} if len(outputs) > 1 else {}

    def index_of(self, value: Tensor) -> int:
        """The first output that autograd comes to from a loss, always by the first way."""
        node: Any = value.grad_fn if self._index_of_node else None
        for _ in range(MAX_GRAPH_STEPS):
            if node is None or node in self._index_of_node:
                break
            node = next((behind for behind, _ in node.next_functions if behind is not None), None)
        return NO_OUTPUT if node is None else self._index_of_node.get(node, NO_OUTPUT)


@functools.cache
def signature(*origins: tuple[str, int, int]) -> float:
    """A number from 1 to 2 that is another one for other origins: function, place and source of each mean."""
    return 1.0 + zlib.crc32(repr(origins).encode()) / 2**32
