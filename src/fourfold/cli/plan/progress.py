"""Plan progress: what `fourfold plan` says while one waits for its answer, on stderr.

terminal  one line, which is replaced; elsewhere a line every few seconds
Law: questions that take less than two seconds show nothing, and stdout has nothing but answers.
"""

import contextlib
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator

from fourfold.planner.plan_text import plan_words
from fourfold.planner.search.decision import Progress
from fourfold.words.terminal_text import escape_controls
from fourfold.words.units import format_bytes, format_step_seconds

FIRST, ON_TERMINAL, ELSEWHERE = 2.0, 0.5, 5.0
"""Seconds until the first line, and between lines."""
WIDTH = 80
CLEAR = "\r\x1b[K"


@contextlib.contextmanager
def shown_progress(progress: Progress) -> Iterator[None]:
    """Within, progress is shown. Where the wait is interrupted, the best plan so far is said."""
    has_ended, is_terminal = threading.Event(), sys.stderr.isatty()
    thread = threading.Thread(target=_show, args=(progress, has_ended, is_terminal), name="plan progress", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(interrupted_text(progress)) from stop
    finally:
        has_ended.set()
        thread.join()


def _show(progress: Progress, has_ended: threading.Event, is_terminal: bool) -> None:
    has_line = False
    seconds = FIRST
    while not has_ended.wait(seconds):
        seconds = ON_TERMINAL if is_terminal else ELSEWHERE
        if line := progress_line(progress, shutil.get_terminal_size().columns if is_terminal else WIDTH):
            sys.stderr.write(f"{CLEAR}{line}" if is_terminal else f"{line}\n")
        elif has_line:
            sys.stderr.write(CLEAR)  # others write now, such as the measurement of this machine
        has_line = is_terminal and bool(line)
        sys.stderr.flush()
    if has_line:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()


def progress_line(progress: Progress, width: int) -> str:
    """How far it is, and the best so far, in less than so many columns; empty: nothing is to be said."""
    if not progress.doing:
        return ""
    share = f", {100 * progress.done // progress.total} %" if progress.total else ""
    line = f"{progress.doing}{share}"
    if (best := progress.best) is not None:
        line += f"; best so far {format_step_seconds(best.seconds)}: {plan_words(best.plan)}"
    line = escape_controls(line)
    return line if len(line) < width else f"{line[: width - 2]}…"


def interrupted_text(progress: Progress) -> str:
    """What is said of a search that was interrupted."""
    best = progress.best
    if best is None:
        return "stopped by SIGINT; no plan that fits was found yet"
    takes = f"{format_step_seconds(best.seconds)} a step, {format_bytes(best.memory.total)} a rank"
    found = textwrap.wrap(f"best so far: {plan_words(best.plan)}", WIDTH - 2, break_on_hyphens=False)
    return "\n  ".join(["stopped by SIGINT; nothing is written", *found, takes])
