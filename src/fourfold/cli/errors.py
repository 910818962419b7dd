"""Failure: how a command ends badly.

Law: one text on stderr, from one process; the exit code says whose fault it was: 2 the input's, 1 the run's, 75
nobody's: the same command is to be started again; 130 after a Ctrl-C.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fourfold.environment.standard_streams import print_stderr
from fourfold.environment.world import from_environment
from fourfold.launch.traceback_text import format_error
from fourfold.words.errors import FourfoldError, LaunchError, StoppedError, closest_match

INPUT_CODE = FourfoldError.exit_code
# A launcher ends all ranks when the first has gone: those that say nothing must not go before the one that speaks.
SILENT_SECONDS = 5.0
STOPPED_SECONDS = 0.5  # they have met a moment ago


class ErrorCollector:
    """Gathers what is wrong in several places, so that all of it can be told at once."""

    def __init__(self) -> None:
        self.errors: list[FourfoldError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Within: an error is kept, and what follows the `with` block goes on."""
        try:
            yield
        except FourfoldError as error:
            self.errors.append(error)

    def raise_collected(self) -> None:
        """Raise what has been gathered, if anything."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ExceptionGroup("several problems", self.errors)


def report_error(error: BaseException) -> int:
    """Print what went wrong; returns the exit code. Under a launcher of others, rank 0 tells of bad input for all."""
    errors = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    code = max((each.exit_code if isinstance(each, FourfoldError) else 1) for each in errors)
    text = "\n".join(_format_error(each) for each in errors)
    try:
        world = from_environment()
    except LaunchError:  # Who we are is what went wrong.
        world = None
    if world is None:
        print_stderr(text)
    elif not _is_input_error(errors) and not isinstance(error, StoppedError):
        print_stderr(f"rank {world.rank} of {world.size} failed\n{text}")
    elif world.rank == 0:
        print_stderr(text)
    else:
        time.sleep(SILENT_SECONDS if _is_input_error(errors) else STOPPED_SECONDS)
    return code


def _is_input_error(errors: Sequence[BaseException]) -> bool:
    """Whether the input is wrong, on every rank. A task that calls `sys.exit(2)` is one rank's error of that code."""
    return any(isinstance(each, FourfoldError) and type(each).exit_code == INPUT_CODE for each in errors)


def _format_error(error: BaseException) -> str:
    return f"fourfold: {error}" if isinstance(error, StoppedError) else format_error(error).rstrip()


def is_file(path: Path) -> bool:
    """Whether a file is there. A name that no file system takes is no file."""
    try:
        return path.is_file()
    except OSError:
        return False


def nearest_file(path: Path, pattern: str) -> str:
    """The file in the same folder that was most likely meant; "" where there is none."""
    try:
        others = [other.stem for other in path.parent.glob(pattern) if other.is_file() and other != path]
    except OSError:  # a name that is too long, a folder that may not be read
        return ""
    close = closest_match(path.stem, others)
    return str(path.with_name(close + path.suffix)) if close else ""
