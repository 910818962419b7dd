"""Signals to a launcher: which of them end a job, and handlers for the time of a `with` block.

Law: every handler that is replaced here is restored when its `with` block ends.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def handled_signals() -> list[signal.Signals]:
    """The signals that end a job: all but those that the caller has set to be ignored.

    `nohup` ignores SIGHUP; a shell without job control ignores SIGINT and SIGQUIT in its background jobs.
    """
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def signal_handler(signals: Iterable[signal.Signals], new_handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within: each of these signals calls `new_handler` and does nothing else."""
    before = {number: signal.signal(number, lambda got, _: new_handler(signal.Signals(got))) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
