"""Loss call sites: which mean of a loss a call of a loss function is.

call site     where in the code the call is, as a number that is the same on all ranks
output index  from which output of the model it is computed
Law: means with different call sites or outputs are parts of different means, as when one rank's batch is of one task
and the next rank's of another. Means that one line takes of the same output, or inside the model, look the same.
"""

import functools
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_FRAMES = 48  # of the call stack
MAX_GRAPH_STEPS = 48  # of the autograd graph, from a loss back to an output
TORCH_DIR = str(Path(torch.__file__).parent)
PACKAGE_DIR = str(Path(__file__).parent.parent)
USER = "user"
_owner_of_file: dict[str, str] = {}
NO_OUTPUT = -1


def call_site() -> int:
    """The current call site: a hash of the stack frames of the user's code, up to Fourfold's own."""
    frame, site, is_inside = sys._getframe(1), 0, False
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        owner = _owner_of_file.get(code.co_filename) or _find_owner(code.co_filename)
        if owner == USER:
            is_inside = True
            site = (site * 31 + code.co_firstlineno * 65537 + frame.f_lasti) & 0xFFFFFFFF
        elif is_inside and owner == PACKAGE_DIR:
            break
        frame = frame.f_back
    return site


def _find_owner(filename: str) -> str:
    owner = next((folder for folder in (PACKAGE_DIR, TORCH_DIR) if filename.startswith(folder)), USER)
    _owner_of_file[filename] = owner
    return owner


class OutputIndex:
    """Finds from which output of a model a loss is computed."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        # With one output there is nothing to find.
        self._index_of_node = {each.grad_fn: index for index, each in enumerate(outputs)} if len(outputs) > 1 else {}

    def index_of(self, value: Tensor) -> int:
        """The first output on the way back from a loss through the graph, always along the first edge."""
        node: Any = value.grad_fn if self._index_of_node else None
        for _ in range(MAX_GRAPH_STEPS):
            if node is None or node in self._index_of_node:
                break
            node = next((previous for previous, _ in node.next_functions if previous is not None), None)
        return NO_OUTPUT if node is None else self._index_of_node.get(node, NO_OUTPUT)


@functools.cache
def signature(*origins: tuple[str, int, int]) -> float:
    """A number from 1 to 2, a hash of the origins: function name, call site and output index of each mean."""
    return 1.0 + zlib.crc32(repr(origins).encode()) / 2**32
