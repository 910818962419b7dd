"""The text of an error for the person who reads it: the user's own lines of the traceback.

owner   who wrote the code of a frame: Python's start-up machinery, torch, fourfold, or the user
elided  consecutive frames that are not the user's, shown as one line that counts them
Law: an error without any line of the user's keeps every frame, since the fault may be ours.
"""

import os
import sys
import sysconfig
import traceback
from pathlib import Path

from fourfold.words.errors import FourfoldError
from fourfold.words.terminal_text import escape_controls


def user_line(error: BaseException) -> str:
    """The innermost frame of the user's, on a line of its own; "" if there is none."""
    library = sysconfig.get_path("stdlib") + os.sep
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _frame_owner(frame.filename) is None and not frame.filename.startswith(library)
    ]
    return "" if not frames else "\n" + "".join(traceback.format_list(frames[-1:])).rstrip()


def format_error(error: BaseException) -> str:
    """The text of an error: a FourfoldError's message, or another error's traceback cut to the user's lines.

    With FOURFOLD_TRACEBACK=full in the environment, every frame of either.
    """
    full = os.environ.get("FOURFOLD_TRACEBACK") == "full"
    if isinstance(error, FourfoldError) and not full:
        return error.full_message()
    report = traceback.TracebackException.from_exception(error)
    if not full:
        _elide_frames(report)
    return escape_controls("".join(report.format()))


class _ElidedStack(traceback.StackSummary):
    """A stack in which some entries stand for several elided frames."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **keywords: object) -> str:
        if frame_summary.filename == _ELIDED:
            return f"  … {frame_summary.name}\n"
        return super().format_frame_summary(frame_summary, **keywords)  # type: ignore[arg-type]


_ELIDED = "<left out>"


def _elide_frames(report: traceback.TracebackException) -> None:
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _elide_frames(other)
    owners = [_frame_owner(frame.filename) for frame in report.stack]
    if all(owners) and not issubclass(report.exc_type or Exception, SyntaxError):
        return  # No line of the user's: the fault may be ours, which needs every frame.
    frames = _ElidedStack()
    skipped: list[str] = []
    for frame, owner in zip([*report.stack, None], [*owners, None], strict=True):
        if owner:
            skipped.append(owner)
            continue
        # Frames before the user's first line are dropped; later gaps are shown.
        if skipped and frames:
            count, names = len(skipped), " and ".join(dict.fromkeys(skipped))
            frames.append(traceback.FrameSummary(_ELIDED, count, f"{count} frame{'s' * (count > 1)} inside {names}"))
        skipped.clear()
        if frame is not None:
            frames.append(frame)
    report.stack = frames


def _frame_owner(filename: str) -> str | None:
    """Who wrote a frame's code: "fourfold", "torch", "Python" (its start-up machinery), or None for the user."""
    if filename.startswith("<frozen ") or os.path.basename(filename) in ("runpy.py", "contextlib.py"):
        return "Python"
    path = os.path.abspath(filename)
    if path.startswith(_FOURFOLD_PATH):
        return None if path.startswith(_TASKS_PATH) else "fourfold"
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return "torch" if torch and path.startswith(os.path.dirname(torch) + os.sep) else None


_FOURFOLD_PATH = str(Path(__file__).resolve().parent.parent) + os.sep
_TASKS_PATH = _FOURFOLD_PATH + "tasks" + os.sep
