"""Pulse: what every rank of a host is at, in memory that their launcher reads.

record   one rank's numbers: its last finished step, where it went on from, what it does and since when
limit    how long a rank may be at the same thing: learned from what it has been through
Law: a rank writes its own record alone, and never waits for a reader.

The launcher makes the file and names it in FOURFOLD_PULSE; without that variable a pulse goes nowhere.
"""

import contextlib
import math
import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

VARIABLE = "FOURFOLD_PULSE"
WORDS = 8  # int64s of a record: a cache line
STEP, RESUMED, PHASE, SINCE, TYPICAL = range(5)
STARTING, STEPPING, PAUSING, DONE = range(4)
REMEMBERED = 31  # steps of which the median is taken
FACTOR = 5
# What has not been seen yet may take long: imports, a compiler in the first step, a first evaluation.
FIRST_SECONDS = 600.0
# A pause is an evaluation or a checkpoint, whose length depends on the data and the disk.
PAUSE_SECONDS = 120.0


class Beat(NamedTuple):
    """One rank's record. `step` is the last finished one and -1 before the first; times are in seconds."""

    step: int
    resumed: int
    phase: int
    since: float
    typical: float

    def limit(self, least: float) -> float:
        """Seconds that the present phase may last."""
        if self.phase == STEPPING:
            return max(least, FACTOR * self.typical)
        if self.phase == PAUSING and self.typical:
            return max(least, PAUSE_SECONDS, FACTOR * self.typical)
        return math.inf if self.phase == DONE else max(least, FIRST_SECONDS)


class Pulse:
    """This rank's record."""

    def __init__(self, words: memoryview, index: int = 0, *, is_read: bool = False) -> None:
        self._words, self._first, self.is_read = words, index * WORDS, is_read
        self.step = -1
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._pauses: deque[float] = deque(maxlen=REMEMBERED)
        self._since = time.monotonic()

    @property
    def since(self) -> float:
        """When the last step, evaluation or checkpoint began or ended, on the monotonic clock."""
        return self._since

    def resumed(self, step: int) -> None:
        """Training goes on after `step`; the first step of this process is next."""
        self._words[self._first + RESUMED] = step

    def beat(self, step: int) -> None:
        """A step has been finished."""
        now = time.monotonic()
        self._steps.append(now - self._since)
        self._enter(STEPPING, now, statistics.median(self._steps))
        self._words[self._first + STEP] = self.step = step

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Within: something that is no step. Before the first step it belongs to the start."""
        before = self._words[self._first + PHASE]
        if before != STEPPING:
            yield
            return
        begin = time.monotonic()
        self._enter(PAUSING, begin, max(self._pauses, default=0.0))
        yield
        now = time.monotonic()
        self._pauses.append(now - begin)
        self._enter(STEPPING, now, statistics.median(self._steps))

    def done(self) -> None:
        """Nothing is limited any more."""
        self._enter(DONE, time.monotonic(), 0.0)

    def _enter(self, phase: int, now: float, typical: float) -> None:
        # The phase last: a reader in between sees a young one, not an old one with a short limit.
        self._since = now
        self._words[self._first + SINCE] = int(now * 1e9)
        self._words[self._first + TYPICAL] = int(typical * 1e9)
        self._words[self._first + PHASE] = phase


def of_environment(environ: Mapping[str, str] = os.environ) -> Pulse:
    """The pulse that this rank's launcher reads; one that nobody reads where it has made none."""
    path = environ.get(VARIABLE)
    if path is None:
        return Pulse(memoryview(bytearray(8 * WORDS)).cast("q"))
    with Path(path).open("r+b") as file:
        return Pulse(memoryview(mmap.mmap(file.fileno(), 0)).cast("q"), int(environ["LOCAL_RANK"]), is_read=True)


class Pulses:
    """The launcher's side: a file in `folder`, with a record for each of `size` ranks."""

    def __init__(self, folder: Path, size: int) -> None:
        self.path, self._size = folder / "pulse", size
        self.path.write_bytes(bytes(8 * WORDS * size))
        with self.path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def begin(self) -> None:
        """An attempt begins: no rank has done anything."""
        fresh = [0] * WORDS
        fresh[STEP] = fresh[RESUMED] = -1
        fresh[SINCE] = time.monotonic_ns()
        for place, word in enumerate(fresh * self._size):
            self._words[place] = word

    def read(self) -> list[Beat]:
        """Every rank's record."""
        rows = [self._words[WORDS * index : WORDS * (index + 1)].tolist() for index in range(self._size)]
        return [Beat(row[STEP], row[RESUMED], row[PHASE], row[SINCE] / 1e9, row[TYPICAL] / 1e9) for row in rows]
