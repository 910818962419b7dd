"""The text of an error for the person who reads it: the user's own lines of the traceback.

owner   who wrote the code of a frame: Python's start-up machinery, torch, fourfold, another library, or the user
elided  consecutive frames that are not the user's, shown as one line that counts them
Law: an error without any line of the user's or a library keeps every frame, since the fault may be ours; unless a note
says in which call of the user's it was raised (`words/error_notes.py`).
"""

import traceback

from fourfold.words.error_notes import INTERNAL, frame_owner, has_note, user_frame, wants_all_frames
from fourfold.words.errors import FourfoldError, shortened
from fourfold.words.terminal_text import escape_controls, terminal_width

MAX_MESSAGE = 2000  # characters; less than `MAX_TEXT`, so that a problem has room for it and the user's lines
MAX_FRAMES = 30  # shown; a model that calls itself has a thousand
FULL_HINT = "  FOURFOLD_TRACEBACK=full shows every frame"


def user_line(error: BaseException) -> str:
    """The innermost frame of the user's, on a line of its own; "" if there is none."""
    frame = user_frame(error)
    return "" if frame is None else "\n" + "".join(traceback.format_list([frame])).rstrip()


def format_error(error: BaseException) -> str:
    """The text of an error: a FourfoldError's message, or another error's traceback cut to the user's lines.

    With FOURFOLD_TRACEBACK=full in the environment, every frame of either, and all of its message.
    """
    full = wants_all_frames()
    if isinstance(error, FourfoldError) and not full:
        return error.full_message(terminal_width())
    report = traceback.TracebackException.from_exception(error)
    if full:
        return escape_controls("".join(report.format()))
    _elide_frames(report)
    return escape_controls("".join(shortened(part, MAX_MESSAGE) for part in report.format()))


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
    owners = [frame_owner(frame.filename) for frame in report.stack]
    # Of a library only the line that failed, and only where no line of the user's is within it.
    if owners and (libraries := [index for index, owner in enumerate(owners) if owner not in INTERNAL]):
        owners[libraries[-1]] = None
    if all(owners) and not issubclass(report.exc_type or Exception, SyntaxError):
        if not has_note(report):
            return  # The fault may be ours, which needs every frame.
        report.__notes__ = [*(report.__notes__ or ()), FULL_HINT]
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
    if middle := frames[MAX_FRAMES // 2 : -MAX_FRAMES // 2]:
        count = sum(frame.filename != _ELIDED for frame in middle)
        more = traceback.FrameSummary(_ELIDED, 0, f"{count} more frames of your code")
        frames[MAX_FRAMES // 2 : -MAX_FRAMES // 2] = [more]
    report.stack = frames
