"""Heartbeat files: the launcher's side of its ranks' heartbeats."""

import mmap
import time
from pathlib import Path

from fourfold.trainer.heartbeat import (
    PHASE,
    PHASE_START,
    RECORD_WORDS,
    RESUMED_STEP,
    STEP,
    TYPICAL_SECONDS,
    HeartbeatRecord,
)


class HeartbeatFile:
    """The launcher's side: a file in `folder`, with a record for each of `size` ranks."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.path, self._num_ranks = folder / "pulse", num_ranks
        self.path.write_bytes(bytes(8 * RECORD_WORDS * num_ranks))
        with self.path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def reset(self) -> None:
        """An attempt begins: no rank has done anything."""
        fresh = [0] * RECORD_WORDS
        fresh[STEP] = fresh[RESUMED_STEP] = -1
        fresh[PHASE_START] = time.monotonic_ns()
        for place, word in enumerate(fresh * self._num_ranks):
            self._words[place] = word

    def read(self) -> list[HeartbeatRecord]:
        """Every rank's record."""
        rows = [
            self._words[RECORD_WORDS * index : RECORD_WORDS * (index + 1)].tolist() for index in range(self._num_ranks)
        ]
        return [
            HeartbeatRecord(
                row[STEP], row[RESUMED_STEP], row[PHASE], row[PHASE_START] / 1e9, row[TYPICAL_SECONDS] / 1e9
            )
            for row in rows
        ]
