"""Early SIGTERM: a command that has not begun its work, or has done it, answers SIGTERM with one line and code 75.

early  while neither training nor the launcher of its ranks handles SIGTERM itself: before them, and after them
Law: a scheduler that ends a job early starts the same command again, whatever the command was doing.

Python's own default would end the process with code 143. This module imports next to nothing: it comes first.
"""

import _thread
import atexit
import os
import signal
from types import FrameType

LINE = b"fourfold: stopped by SIGTERM; run the same command again\n"
_SIGTERM = {signal.SIGTERM}
_answering = _thread.allocate_lock()
_writers: list[int] = []
"""The file descriptor that wakes the thread of `answer_in_thread`, while there is one."""


def install() -> None:
    """From now on SIGTERM ends this process with exit code 75. Changes nothing if SIGTERM is handled or ignored."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, exit_requeued)
        atexit.register(_ignore)  # the first that is registered is the last that runs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)


def exit_requeued(number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
    """The handler. It may run in the middle of an import, so it imports nothing and raises nothing."""
    if not _answering.acquire(blocking=False):
        return  # another thread is about to end this process
    try:
        os.write(2, LINE)
    finally:
        os._exit(os.EX_TEMPFAIL)


def keep_over_exec() -> None:
    """A SIGTERM from here on waits until the program that replaces this one calls `install`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)


def is_installed() -> bool:
    return signal.getsignal(signal.SIGTERM) is exit_requeued


def answer_in_thread() -> None:
    """Answer SIGTERM even while the main thread waits in a call that runs no handler, such as a rendezvous."""
    if not is_installed():
        return
    import threading

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _writers.append(writer)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="fourfold SIGTERM", daemon=True).start()


def _watch(reader: int) -> None:
    while numbers := os.read(reader, 4096):
        if signal.SIGTERM in numbers and is_installed():
            exit_requeued()


def _ignore() -> None:
    """Python drops its handlers before it frees what torch holds, which takes a while; the exit code stands by now.

    Unless a thread is answering: it ends the process while this one waits. Later, Python would not let it go on.
    """
    if is_installed():
        _answering.acquire()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def restore() -> None:
    """Python's own handler again, for a program that is not ours, and no thread."""
    if is_installed():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while _writers:
        writer, current = _writers.pop(), signal.set_wakeup_fd(-1)
        if current != writer:
            signal.set_wakeup_fd(current)
        os.close(writer)


# Or the thread of the process that forks would take the fork's signals for its own.
os.register_at_fork(after_in_child=restore)
