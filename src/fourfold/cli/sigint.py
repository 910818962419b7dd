"""SIGINT: a Ctrl-C while a command is still importing is not lost.

Python raises KeyboardInterrupt wherever the main thread is. Inside a callback of the import system Python prints and
drops it, and the command would go on.

install            at the start of the command: remember an interrupt as well as raise it
raise_pending      after other code that may have dropped one
restore_and_raise  when the imports are done: Python's own handler is back, which a program may replace
restore            at the end, however the command ends: a program that called it has its handler back
"""

import signal
from types import FrameType

_is_interrupted = False


def install() -> None:
    """From now on an interrupt is remembered too. Changes nothing if the program handles SIGINT itself."""
    global _is_interrupted
    _is_interrupted = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _is_interrupted
    _is_interrupted = True
    signal.default_int_handler(number, frame)


def restore_and_raise() -> None:
    """Restore Python's handler. Raises KeyboardInterrupt if there was an interrupt and other code dropped it."""
    restore()
    raise_pending()


def raise_pending() -> None:
    """Raises KeyboardInterrupt if there was an interrupt and other code dropped it. Later ones are remembered too."""
    if _is_interrupted:
        raise KeyboardInterrupt


def restore() -> None:
    """Restore Python's own handler."""
    if signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
