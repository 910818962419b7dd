"""Interrupt: a Ctrl-C while a command is still importing is not lost.

Python raises KeyboardInterrupt wherever the main thread is. In a callback of the import system it is printed and
dropped, and the command would go on as if nobody had asked it to stop.

listen  from the start of the command
check   when its imports are done: Python's own handler is there again, which a program may replace
insist  after code of others that may have dropped it
stop    at its end, however it ends: whoever called it in a process of theirs has their handler back
"""

import signal
from types import FrameType

_is_interrupted = False


def install() -> None:
    """From now on an interrupt is remembered too; where somebody else handles SIGINT, nothing changes."""
    global _is_interrupted
    _is_interrupted = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _is_interrupted
    _is_interrupted = True
    signal.default_int_handler(number, frame)


def restore_and_raise() -> None:
    """Stop listening. Raises KeyboardInterrupt if one was raised and has not come through."""
    restore()
    raise_pending()


def raise_pending() -> None:
    """Raises KeyboardInterrupt if one was raised and has not come through; the listening goes on."""
    if _is_interrupted:
        raise KeyboardInterrupt


def restore() -> None:
    """Stop listening: Python's own handler is there again."""
    if signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
