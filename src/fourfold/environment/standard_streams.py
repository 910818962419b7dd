"""Standard streams: writing to stdout and stderr when their reader may be gone or their disk full.

Law: a message that cannot be written changes neither what a process does nor its exit code.
"""

import contextlib
import os
import sys
from typing import TextIO

from fourfold.words.terminal_text import wrap_lines


def print_stderr(text: str) -> None:
    """Write a text to stderr at once, wrapped to the terminal; do nothing if stderr cannot be written."""
    if sys.stderr is None:  # print(file=None) would write to stdout
        return
    try:
        print(wrap_lines(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: the program closed it
        redirect_to_null(sys.stderr)


def redirect_to_null(stream: TextIO) -> None:
    """Discard the stream's buffer and whatever is written later: Python would fail to flush the buffer at exit."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, or one that is closed
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


def flush_streams() -> None:
    """Write out the buffers of stdout and stderr, as far as possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: None, a closed stream
            stream.flush()
