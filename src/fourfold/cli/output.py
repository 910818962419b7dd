"""Output: what a command prints, and the files that it writes.

Law: controls are escaped, and lines are wrapped to the terminal.
"""

import logging
from pathlib import Path

from fourfold.environment.atomic_file import write_atomically
from fourfold.environment.standard_streams import print_stderr
from fourfold.words.errors import Problem, SettingError, os_error_text
from fourfold.words.terminal_text import escape_controls, wrap_lines


class _WrappedLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_stderr(escape_controls(self.format(record)))


def wrap_log() -> None:
    """From now on warnings of the log go to stderr wrapped, unless the task sets up logging of its own."""
    logging.lastResort = _WrappedLog(logging.WARNING)


def write_file(path: Path, text: str, *, where: str) -> None:
    """Write a file, whole, and its folders. Raises SettingError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        got = f"{path} could not be written: {os_error_text(error)}"
        raise SettingError(Problem(got, "a place that can be written to", "another path"), where=where) from None


def print_text(text: str) -> None:
    """Print a text of a command. Raises OSError as `print` does."""
    print(wrap_lines(escape_controls(text)), flush=True)
