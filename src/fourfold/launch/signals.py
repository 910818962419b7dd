"""Signals of a launcher: which of them end a job, and handlers that are put in for a while.

Law: every handler that is replaced here comes back when its `with` block ends.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def handled_signals() -> list[signal.Signals]:
    """The signals that end a job: those that whoever started it has not had ignored.

    `nohup` does so with SIGHUP, a shell without job control with SIGINT and SIGQUIT of its background.
    """
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def signal_handler(signals: Iterable[signal.Signals], new_handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within: a signal to end does `act` and nothing else."""
    before = {number: signal.signal(number, lambda got, _: new_handler(signal.Signals(got))) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    """The agent replaces signal handlers and keeps them; afterwards they are as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
