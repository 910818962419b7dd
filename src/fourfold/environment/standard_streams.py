"""Streams: stdout and stderr, whose reader may have gone, and whose disk may be full.

Law: a message that cannot be written changes neither what a process does nor its exit code.
"""

import contextlib
import os
import sys
from typing import TextIO


def print_stderr(text: str) -> None:
    """Write a line to stderr at once. Where stderr takes nothing, nothing is said."""
    if sys.stderr is None:  # print(file=None) would write to stdout
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: a program has closed it
        redirect_to_null(sys.stderr)


def redirect_to_null(stream: TextIO) -> None:
    """From now on the stream leads nowhere, with what is in its buffer: Python would fail on that at the exit."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, or one that is closed
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


def flush_streams() -> None:
    """Write out what stdout and stderr have in their buffers, as far as they take it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: None, a closed stream
            stream.flush()
