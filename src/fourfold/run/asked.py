"""Asked: whether this process has been asked to stop.

Law: a signal only leaves a note; what follows from it is decided between two steps, by all ranks.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Within: SIGTERM leaves a note, and the function given tells of it. A handler of the user's own is left alone."""
    notes: list[int] = []  # not a threading.Event: a second signal within its `set` would wait for the first for ever
    is_main = threading.current_thread() is threading.main_thread()
    mine = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, lambda number, _: notes.append(number))
    try:
        yield lambda: bool(notes)
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
