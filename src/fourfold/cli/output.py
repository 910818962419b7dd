"""Output: what a command prints.

Law: controls are escaped, and lines are wrapped to the terminal.
"""

import logging

from fourfold.environment.standard_streams import print_stderr
from fourfold.words.terminal_text import escape_controls, wrap_lines


class _WrappedLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_stderr(escape_controls(self.format(record)))


def wrap_log() -> None:
    """From now on warnings of the log go to stderr wrapped, unless the task sets up logging of its own."""
    logging.lastResort = _WrappedLog(logging.WARNING)


def print_text(text: str) -> None:
    """Print a text of a command. Raises OSError as `print` does."""
    print(wrap_lines(escape_controls(text)), flush=True)
