"""Transform worker: a process that calls a transform for one sample after the other; see `transform_processes.py`.

Started as `python -m fourfold.feed.transform_worker FILE.py:name SOCKET MEMORY`, the last two file descriptors.
Law: what a sample draws, from its generator or from the process's own, is a function of its seed.
"""

import importlib.util
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fourfold.environment.processes import leave_signals_to_parent
from fourfold.feed.transform import Message, Slot, with_generator
from fourfold.words.error_notes import error_line


def main(spec: str, connection: int, handle: int) -> None:
    """Transform samples until the other end closes the socket."""
    leave_signals_to_parent()  # a rank that ends closes the socket
    torch.set_num_threads(1)
    slot, function = Slot(socket.socket(fileno=connection), handle), None
    while (message := slot.receive()) is not None:
        try:
            function = function or _find(spec)
            random.seed(message.seed)
            np.random.seed(message.seed % 2**32)
            torch.manual_seed(message.seed)
            slot.send(function(slot.sample(message), torch.Generator().manual_seed(message.seed)))
        except BrokenPipeError:
            return
        except Exception as error:  # raised again in the process that waits for the sample
            slot.reply(Message(error=error_line(error)))


def _find(spec: str) -> Callable[[Any, torch.Generator], Any]:
    file, _, name = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.path.insert(0, str(Path(file).parent))
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise TypeError(f"{file} has no function {name}")
    return with_generator(function)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
