"""Known waits: what this process waits for, where its own code knows it, such as an origin that does not answer.

slot   a few int64s that hold the oldest known wait; in memory that others may read, such as this process's launcher
owner  the process whose wait the slot holds: this one, or one that it has started, such as a worker of a DataLoader
Law: a wait is in the slot from the beginning to the end of its `with` block, and nobody is called: who asks, reads.
"""

import contextlib
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.environment.processes import process_state

SINCE, UNTIL, OWNER, TEXT = range(4)
SLOT_WORDS = 24
TEXT_BYTES = 8 * (SLOT_WORDS - TEXT)


class KnownWait(NamedTuple):
    """What a process waits for, and since when; `what` is "" if it does not wait. `until`: when its last wait ended.

    Times are seconds of the monotonic clock, 0 if there was none.
    """

    what: str = ""
    since: float = 0.0
    until: float = 0.0

    @property
    def clause(self) -> str:
        """For the end of a sentence; "" if the process does not wait."""
        return f", waiting for {self.what}" if self.what else ""


class _Waits:
    """The waits of this process, oldest first."""

    def __init__(self) -> None:
        self.slot = memoryview(bytearray(8 * SLOT_WORDS)).cast("q")
        self.place: tuple[str, int] | None = None
        self.numbers = itertools.count()
        self.reset()

    def reset(self) -> None:
        self.lock, self.entries = threading.Lock(), dict[int, tuple[int, str]]()

    def publish(self) -> None:
        """Write the oldest wait into the slot, unless that holds a wait of another process."""
        owner = self.slot[OWNER]
        if owner not in (0, os.getpid()) and process_state(owner) not in ("", "Z"):
            return
        # In this order a reader in between sees a wait that has just ended, and never a rank that did not wait.
        self.slot[UNTIL] = time.monotonic_ns()
        self.slot[SINCE] = 0
        if not self.entries:
            self.slot[OWNER] = 0
            return
        since, what = next(iter(self.entries.values()))
        self.slot[OWNER] = os.getpid()
        self.slot[TEXT:].cast("B")[:] = what.encode(errors="backslashreplace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        self.slot[SINCE] = since


_waits = _Waits()
os.register_at_fork(after_in_child=_waits.reset)


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[Callable[[str], None]]:
    """Within: this process waits for `what`. The function yielded says it anew, such as with the last error."""
    number, begin = next(_waits.numbers), time.monotonic_ns()

    def say(text: str) -> None:
        with _waits.lock:
            _waits.entries[number] = begin, text
            _waits.publish()

    say(what)
    try:
        yield say
    finally:
        with _waits.lock:
            del _waits.entries[number]
            _waits.publish()


def write_to(slot: memoryview, place: tuple[str, int] | None = None) -> None:
    """From now on the waits of this process, and of those that it forks later, stand in `slot`: SLOT_WORDS int64s.

    place: the file that it is in, and its first int64 there, for `HandedSlot`
    """
    with _waits.lock:
        _waits.slot, _waits.place = slot, place


def mapped_words(path: Path) -> memoryview:
    """The int64s of a file."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


class HandedSlot:
    """The slot of this process, for one that it starts. One that is forked has it already; one that is spawned, to
    which this is pickled, maps its file."""

    def __init__(self, place: tuple[str, int] | None = None) -> None:
        self._place = place

    def __reduce__(self) -> Any:
        return HandedSlot, (_waits.place,)

    def take(self) -> None:
        """In the new process: its waits stand in the slot from now on."""
        if self._place is not None:
            path, start = self._place
            write_to(mapped_words(Path(path))[start : start + SLOT_WORDS], self._place)


def read(slot: memoryview) -> KnownWait:
    since, until = slot[SINCE], slot[UNTIL]
    text = bytes(slot[TEXT:].cast("B")).rstrip(b"\0").decode(errors="replace") if since else ""
    return KnownWait(text, since / 1e9, until / 1e9)
