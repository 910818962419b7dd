"""Errors: how a command that fails reports it.

Law: rank 0 alone reports bad input and an agreed stop; each rank that fails in another way reports that. The exit code
says why: 2 the input is wrong; 1 the run failed; 75 SIGTERM or a dead peer: start the same command again; 130 Ctrl-C.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from fourfold.environment.standard_streams import print_stderr
from fourfold.environment.world import from_environment
from fourfold.launcher.traceback_text import format_error
from fourfold.words.errors import FourfoldError, LaunchError, Problem, SettingError, StoppedError, closest_match
from fourfold.words.run_files import RUNS_DIR

P = ParamSpec("P")
T = TypeVar("T")
INPUT_CODE = FourfoldError.exit_code
# A launcher ends all ranks when the first has ended: silent ranks must not end before the one that reports.
SILENT_SECONDS = 5.0
STOPPED_SECONDS = 0.5  # after a stop, which all ranks have agreed on a moment ago


class ErrorCollector:
    """Collects errors from several checks, so that all of them are reported at once."""

    def __init__(self) -> None:
        self.errors: list[FourfoldError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context manager: a FourfoldError is collected, and execution continues after the `with` block."""
        try:
            yield
        except FourfoldError as error:
            self.errors.append(error)

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What the function returns; None where it raises a FourfoldError, which is collected."""
        with self.collect():
            return function(*args, **kwargs)
        return None

    def raise_collected(self) -> None:
        """Raise the collected errors, if there are any; each text once."""
        errors = [*{str(error): error for error in self.errors}.values()]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup("several problems", errors)


def report_error(error: BaseException) -> int:
    """Print an error; returns the exit code. Under another launcher, rank 0 reports bad input for all ranks."""
    errors: tuple[BaseException, ...] = (error,)
    if isinstance(error, ExceptionGroup) and all(isinstance(each, FourfoldError) for each in error.exceptions):
        errors = error.exceptions  # what was collected; a group of the task's is one error
    code = max((each.exit_code if isinstance(each, FourfoldError) else 1) for each in errors)
    text = "\n".join(_format_error(each) for each in errors)
    try:
        world = from_environment()
    except LaunchError:  # The launcher's variables are themselves the error.
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
    """Whether the input is wrong, which every rank finds.

    The class decides, not the error: a task's `sys.exit(2)` gives one rank's error the same exit code.
    """
    return any(isinstance(each, FourfoldError) and type(each).exit_code == INPUT_CODE for each in errors)


def _format_error(error: BaseException) -> str:
    return f"fourfold: {error}" if isinstance(error, StoppedError) else format_error(error).rstrip()


def is_file(path: Path) -> bool:
    """Whether this is a file. False for a name that no file system accepts."""
    try:
        return path.is_file()
    except OSError:
        return False


def nearest_file(path: Path, pattern: str) -> str:
    """The file in the same folder that was most likely meant; "" if there is none."""
    try:
        others = {other.stem: str(other) for other in path.parent.glob(pattern) if other.is_file() and other != path}
    except OSError:  # a name that is too long, or a folder that this user may not read
        return ""
    close = closest_match(path.stem, others)
    return others[close] if close else ""


def find_run(word: str, command: str) -> Path:
    """The folder of the run that a command was given by its path or its name. Raises SettingError."""
    parent = Path(RUNS_DIR)
    for path in (Path(word), parent / word):
        with contextlib.suppress(OSError):  # a name that is too long for a file system
            if word and path.is_dir():
                return path
    runs = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    close = closest_match(Path(word).name, runs) or (runs[-1] if runs else "")
    attempt = f"{command} {close}" if close else "fourfold train"
    raise SettingError(Problem(f"no run {word}", "the folder of a run, or its name", attempt), where=command)
