"""Heartbeat file: the launcher's side of its ranks' heartbeats (`trainer.heartbeat` has the record's layout)."""

import mmap
import time
from pathlib import Path

from fourfold.environment import known_waits
from fourfold.trainer.heartbeat import (
    PHASE,
    PHASE_START,
    RECORD_WORDS,
    RESUMED_STEP,
    STEP,
    TYPICAL_SECONDS,
    WAIT_WORDS,
    HeartbeatRecord,
)


class HeartbeatFile:
    """A file in `folder` with a record for each of `num_ranks` ranks, mapped into the launcher's memory."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.path, self._num_ranks = folder / "pulse", num_ranks
        self.path.write_bytes(bytes(8 * RECORD_WORDS * num_ranks))
        with self.path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def reset(self) -> None:
        """An attempt begins: every rank is starting."""
        fresh = [0] * RECORD_WORDS
        fresh[STEP] = fresh[RESUMED_STEP] = -1
        fresh[PHASE_START] = time.monotonic_ns()
        for index, word in enumerate(fresh * self._num_ranks):
            self._words[index] = word

    def read(self) -> list[HeartbeatRecord]:
        """Every rank's record."""
        starts = range(0, RECORD_WORDS * self._num_ranks, RECORD_WORDS)
        return [_record(self._words[start : start + RECORD_WORDS]) for start in starts]


def _record(row: memoryview) -> HeartbeatRecord:
    wait = known_waits.read(row[WAIT_WORDS])
    return HeartbeatRecord(
        row[STEP], row[RESUMED_STEP], row[PHASE], row[PHASE_START] / 1e9, row[TYPICAL_SECONDS] / 1e9, wait
    )
