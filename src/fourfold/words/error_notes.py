"""Notes of errors: which of the user's functions has failed, where it stands, and with what.

note   a line after an error's own message. Its type and its message stay, and Python's own tracebacks show notes too
owner  who wrote the code of a frame: Python's start-up machinery, torch, fourfold, another library, or the user
Law: an error with a note was raised in a call of the user's model, loss or functions: its text needs no frame of ours.
"""

import contextlib
import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fourfold.words.errors import FourfoldError

FOURFOLD_PATH = str(Path(__file__).resolve().parent.parent) + os.sep
TASKS_PATH = FOURFOLD_PATH + "tasks" + os.sep
LIBRARY_PATHS = {sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep}
STDLIB_PATH = sysconfig.get_path("stdlib") + os.sep
INTERNAL = ("fourfold", "torch", "Python")  # owners


class Note(str):
    """A note of ours; a library may add notes too."""

    __slots__ = ()


def add_notes(error: BaseException, lines: Sequence[str]) -> None:
    """Add notes that an error does not have yet, unless it says itself what is wrong."""
    for line in lines:
        if not isinstance(error, FourfoldError) and line not in getattr(error, "__notes__", ()):
            error.add_note(Note(line))


def has_note(error: BaseException | traceback.TracebackException) -> bool:
    """Whether one of an error's notes is ours."""
    return any(isinstance(note, Note) for note in getattr(error, "__notes__", None) or ())


def frame_owner(filename: str) -> str | None:
    """Who wrote a frame's code: "fourfold", "torch", "Python" (its start-up), a library, or the user: None."""
    if filename.startswith("<frozen ") or os.path.basename(filename) in ("runpy.py", "contextlib.py"):
        return "Python"
    path = os.path.abspath(filename)
    if path.startswith(FOURFOLD_PATH):
        return None if path.startswith(TASKS_PATH) else "fourfold"
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch and path.startswith(os.path.dirname(torch) + os.sep):
        return "torch"
    libraries = (path.removeprefix(each) for each in LIBRARY_PATHS if path.startswith(each))
    return next((each.split(os.sep)[0].removesuffix(".py") for each in libraries), None)


def _is_users(filename: str) -> bool:
    return frame_owner(filename) is None and not filename.startswith(STDLIB_PATH)


def error_line(error: BaseException) -> str:
    """An error in a line, with the innermost line of the user's: "KeyError: 'x' (task.py, line 7)"."""
    frame = user_frame(error)
    return f"{type(error).__name__}: {error}{frame_place(frame)}"


def user_frame(error: BaseException | None = None) -> traceback.FrameSummary | None:
    """The innermost frame of the user's in an error's traceback, or in the stack of this call; None if none is."""
    # The outermost frame of a stack is the script of a command.
    stack = traceback.extract_stack()[1:] if error is None else traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(stack) if _is_users(frame.filename)), None)


def wants_all_frames() -> bool:
    """Whether FOURFOLD_TRACEBACK=full is in the environment."""
    return os.environ.get("FOURFOLD_TRACEBACK") == "full"


def outer_traceback(error: BaseException) -> TracebackType | None:
    """An error's traceback from the first line of the user's or a library's on; the whole one if there is none."""
    place = None if wants_all_frames() else error.__traceback__
    while place is not None and frame_owner(place.tb_frame.f_code.co_filename) in INTERNAL:
        place = place.tb_next
    return place or error.__traceback__


def frame_place(frame: traceback.FrameSummary | None) -> str:
    """Where a frame stands: " (task.py, line 7)"; "" for None."""
    return "" if frame is None else f" ({os.path.basename(frame.filename)}, line {frame.lineno})"


def describe_function(function: Any) -> str:
    """A function's name, the arguments that a partial has, and where it stands if the user has written it."""
    arguments = ""
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        arguments, function = f"({', '.join(given)})", function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name + arguments + user_place(function.__init__ if isinstance(function, type) else function)


def user_place(function: Any) -> str:
    """Where a function of the user's stands: " (task.py, line 7)"; "" for other functions."""
    code = getattr(function, "__code__", getattr(getattr(function, "__call__", None), "__code__", None))  # noqa: B004
    if code is None or not _is_users(code.co_filename):
        return ""
    return f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


@contextlib.contextmanager
def noting(text: str) -> Iterator[None]:
    """Within: an error of the user's function gets a note."""
    try:
        yield
    except Exception as error:
        add_notes(error, [text])
        raise


def innermost_self(error: BaseException, kind: type | tuple[type, ...]) -> Any:
    """The innermost object of these types whose method has failed; None if there is none."""
    found, place = None, error.__traceback__
    while place is not None:
        owner = place.tb_frame.f_locals.get("self")
        found, place = owner if isinstance(owner, kind) else found, place.tb_next
    return found


def format_names(names: Sequence[str]) -> str:
    """The first three names."""
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
