"""Heartbeats: what every rank of a host is doing, in memory that its launcher reads, and what a stack says of it.

record   one rank's numbers: its last finished step, the step it resumed from, its phase, and since when; its known wait
phase    starting, stepping, paused (an evaluation or a checkpoint), or done
limit    how long a phase may last: learned from the steps and pauses that this rank has measured
known wait   what the rank waits for, where it knows that (`environment/known_waits.py`)
Law: a rank writes only its own record, and never waits for a reader.

The launcher makes the file (`launcher.hang_detector`) and names it in FOURFOLD_PULSE. Without that variable the record
has no reader.
"""

import contextlib
import itertools
import math
import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fourfold.environment import known_waits
from fourfold.environment.known_waits import KnownWait

# ---- the record ------------------------------------------------------------------------------------------------------


HEARTBEAT_VARIABLE = "FOURFOLD_PULSE"
RECORD_WORDS = 32  # int64s of a record: four cache lines
WAIT_WORDS = slice(RECORD_WORDS - known_waits.SLOT_WORDS, RECORD_WORDS)
STEP, RESUMED_STEP, PHASE, PHASE_START, TYPICAL_SECONDS = range(5)
STARTING, STEPPING, PAUSED, DONE = range(4)
MAX_SAMPLES = 31  # steps that the median is taken over
LIMIT_FACTOR = 5
# What has not been measured yet may take long: imports, a compiler in the first step, a first evaluation.
FIRST_SECONDS = 600.0
# The length of a pause depends on the data and the disk.
PAUSE_SECONDS = 120.0


class HeartbeatRecord(NamedTuple):
    """One rank's record. `step` is the last finished one, -1 before the first; times are in seconds."""

    step: int
    resumed_step: int
    phase: int
    phase_start: float
    typical_seconds: float
    wait: KnownWait = KnownWait()

    @property
    def done_step(self) -> int:
        """The last step of the run that is done, here or in the attempt from which this one resumed."""
        return max(self.step, self.resumed_step)

    def limit_seconds(self, min_seconds: float) -> float:
        """How long the present phase may last."""
        if self.phase == STEPPING:
            return max(min_seconds, LIMIT_FACTOR * self.typical_seconds)
        if self.phase == PAUSED and self.typical_seconds:
            return max(min_seconds, PAUSE_SECONDS, LIMIT_FACTOR * self.typical_seconds)
        return math.inf if self.phase == DONE else max(min_seconds, FIRST_SECONDS)


class Heartbeat:
    """This rank's record, and what it has measured."""

    def __init__(self, words: memoryview, index: int = 0, *, has_reader: bool = False) -> None:
        """`words` are int64s; the record is the one at `index`."""
        self._words, self._offset, self.has_reader = words, index * RECORD_WORDS, has_reader
        self.step = -1
        self._step_seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._pause_seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        self.phase_start = time.monotonic()
        """When the last step, evaluation or checkpoint began or ended, on the monotonic clock."""

    @property
    def num_ranks(self) -> int:
        """The ranks whose records these are: those of this host, or this one."""
        return len(self._words) // RECORD_WORDS

    def waits(self) -> dict[int, KnownWait]:
        """What the ranks of this host wait for, by their index on it, as far as they know it."""
        records = [self._words[at : at + RECORD_WORDS] for at in range(0, len(self._words), RECORD_WORDS)]
        waits = {index: known_waits.read(record[WAIT_WORDS]) for index, record in enumerate(records)}
        return {index: wait for index, wait in waits.items() if wait.since}

    @property
    def wait(self) -> KnownWait:
        """What this rank waits for, as far as it knows it."""
        return known_waits.read(self._words[self._offset :][WAIT_WORDS])

    @property
    def is_stepping(self) -> bool:
        """Whether a step has ended, and neither an evaluation nor a checkpoint has begun since."""
        return self._words[self._offset + PHASE] == STEPPING

    @property
    def step_seconds(self) -> float:
        """The median of the last steps; 0 before the first."""
        return statistics.median(self._step_seconds) if self._step_seconds else 0.0

    def mean_seconds(self, num_steps: int) -> float:
        """The mean of the last `num_steps`, or of as many as are remembered; 0 if there were none."""
        last = list(self._step_seconds)[-num_steps:] if num_steps else []
        return statistics.fmean(last) if last else 0.0

    def set_resumed_step(self, step: int) -> None:
        """Training resumes after `step`; the next step is this process's first."""
        self._words[self._offset + RESUMED_STEP] = step

    def beat(self, step: int) -> None:
        """`step` has finished."""
        now = time.monotonic()
        self._step_seconds.append(now - self.phase_start)
        self._set_phase(STEPPING, now, self.step_seconds)
        self._words[self._offset + STEP] = self.step = step

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Within: an evaluation or a checkpoint. One before the first step counts as starting."""
        if self._words[self._offset + PHASE] != STEPPING:
            yield
            return
        begin = time.monotonic()
        self._set_phase(PAUSED, begin, max(self._pause_seconds, default=0.0))
        yield
        now = time.monotonic()
        self._pause_seconds.append(now - begin)
        self._set_phase(STEPPING, now, self.step_seconds)

    def mark_done(self) -> None:
        """From now on nothing has a limit."""
        self._set_phase(DONE, time.monotonic(), 0.0)

    def _set_phase(self, phase: int, now: float, typical_seconds: float) -> None:
        # The phase last: a reader in between sees an old phase that began just now, not a new one that began long ago.
        self.phase_start = now
        self._words[self._offset + PHASE_START] = int(now * 1e9)
        self._words[self._offset + TYPICAL_SECONDS] = int(typical_seconds * 1e9)
        self._words[self._offset + PHASE] = phase


def from_environment(environ: Mapping[str, str] = os.environ) -> Heartbeat:
    """This rank's heartbeat in the launcher's shared file, or one without a reader if there is no launcher.

    The known waits of this process stand in it from now on.
    """
    path = environ.get(HEARTBEAT_VARIABLE)
    if path is None:
        words, index = memoryview(mmap.mmap(-1, 8 * RECORD_WORDS)).cast("q"), 0  # shared with forks
    else:
        words, index = known_waits.mapped_words(Path(path)), int(environ["LOCAL_RANK"])
    start = index * RECORD_WORDS
    known_waits.write_to(words[start:][WAIT_WORDS], None if path is None else (path, start + WAIT_WORDS.start))
    return Heartbeat(words, index, has_reader=path is not None)


# ---- what a stack says -----------------------------------------------------------------------------------------------


MAX_FRAMES = 6  # innermost frames that are shown and judged
COMM_PATH = os.path.join("fourfold", "comm") + os.sep


def waits_for_peers(frames: Iterable[str]) -> bool:
    """Whether a rank waits for other ranks: a frame lies in fourfold.comm.

    `frames`: texts that name each frame's file, innermost first; only the first MAX_FRAMES are judged.
    """
    return any(COMM_PATH in frame for frame in itertools.islice(frames, MAX_FRAMES))
