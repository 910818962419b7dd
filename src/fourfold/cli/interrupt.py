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

_heard = False


def listen() -> None:
    """From now on an interrupt is remembered too; where somebody else handles SIGINT, nothing changes."""
    global _heard
    _heard = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)


def _hear(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    signal.default_int_handler(number, frame)


def check() -> None:
    """Stop listening. Raises KeyboardInterrupt if one was raised and has not come through."""
    stop()
    insist()


def insist() -> None:
    """Raises KeyboardInterrupt if one was raised and has not come through; the listening goes on."""
    if _heard:
        raise KeyboardInterrupt


def stop() -> None:
    """Stop listening: Python's own handler is there again."""
    if signal.getsignal(signal.SIGINT) is _hear:
        signal.signal(signal.SIGINT, signal.default_int_handler)
