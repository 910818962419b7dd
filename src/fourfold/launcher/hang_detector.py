"""Hang detector: reads what its ranks are doing, finds the one that holds up all the others, and kills it.

overdue  a rank that has been in one phase longer than its limit, not counting the time of known waits of any rank
culprit  a rank that was stopped (SIGSTOP); if none was, one that does not wait for others; if all wait, the overdue
stack    where a culprit was, as Python's faulthandler writes it on SIGUSR2: its main thread, or the thread that reads
         its batches where the main thread waits for that
Law: a culprit is killed with SIGKILL, because a stopped process does not react to SIGTERM.

`trainer.heartbeat` has the ranks' side of the file of heartbeats, and the layout of its records.
"""

import contextlib
import itertools
import math
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.environment import known_waits
from fourfold.environment.known_waits import KnownWait
from fourfold.environment.processes import process_state
from fourfold.trainer.heartbeat import (
    PHASE,
    PHASE_START,
    RECORD_WORDS,
    RESUMED_STEP,
    STARTING,
    STEP,
    TYPICAL_SECONDS,
    WAIT_WORDS,
    HeartbeatRecord,
    waits_for_peers,
)

# ---- what the ranks are doing ----------------------------------------------------------------------------------------


class HeartbeatFile:
    """A file in `folder` with a record for each of `num_ranks` ranks, mapped into the launcher's memory."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.path, self._num_ranks = folder / "pulse", num_ranks
        self.path.write_bytes(bytes(8 * RECORD_WORDS * num_ranks))
        self._words = known_waits.mapped_words(self.path)

    def reset(self) -> None:
        """An attempt begins: every rank is starting."""
        fresh = [0] * RECORD_WORDS
        fresh[STEP] = fresh[RESUMED_STEP] = -1
        fresh[PHASE_START] = time.monotonic_ns()
        for index, word in enumerate(fresh * self._num_ranks):
            self._words[index] = word

    def read(self) -> list[HeartbeatRecord]:
        """Every rank's record."""
        rows = [self._words[RECORD_WORDS * rank :][:RECORD_WORDS] for rank in range(self._num_ranks)]
        return [
            HeartbeatRecord(
                step=row[STEP],
                resumed_step=row[RESUMED_STEP],
                phase=row[PHASE],
                phase_start=row[PHASE_START] / 1e9,
                typical_seconds=row[TYPICAL_SECONDS] / 1e9,
                wait=known_waits.read(row[WAIT_WORDS]),
            )
            for row in rows
        ]


# ---- which of them hangs ---------------------------------------------------------------------------------------------


STACKS_VARIABLE = "FOURFOLD_STACKS"
DUMP_SIGNAL = signal.SIGUSR2
DUMP_SECONDS, RESEND_SECONDS = 3.0, 0.1
POLL_SECONDS = 0.002
STOPPED_SECONDS = 2.0  # without a question, in which a launcher that runs asks many times
MAX_WAIT_SECONDS = 1200.0  # an origin gives up after 900 (`feed/staging/origin.py`)
# The outermost frame, of `python -m`, of a script or the command `fourfold`; or very many frames.
STACK_ENDS = (" in _run_module_as_main\n", " in <module>\n", "  ...\n")
THREAD_TITLE = re.compile(r"^(?:Current thread|Thread) .*\n", re.MULTILINE)  # the main thread comes last
STARTS_PYTHON = re.compile(r"<frozen runpy>| in _bootstrap(?:_inner)?$")
FEED_PATH = os.path.join("fourfold", "feed", "reading.py")


@dataclass(frozen=True)
class Hang:
    """Ranks that held up the others. `is_stopped`: because a signal had stopped them."""

    ranks: Sequence[int]
    seconds: float
    is_stopped: bool
    stack: str


class Watch:
    """Which ranks hang. It is asked often: a long time without a question is one in which this launcher was stopped.

    hang  the ranks that were killed; None: none was
    """

    def __init__(self) -> None:
        self.hang: Hang | None = None
        self._asked_at, self._awake_since = math.inf, 0.0

    def overdue_ranks(self, heartbeats: Sequence[HeartbeatRecord], *, min_seconds: float, now: float) -> list[int]:
        """The ranks that have been in the same phase for longer than their limit.

        Ranks wait for each other, so the clock of all stands still while one of them waits for what it knows. It begins
        anew when this launcher was stopped (`docker pause`, `scontrol suspend`): its ranks were then, too.
        """
        if now - self._asked_at > STOPPED_SECONDS:
            self._awake_since = now
        self._asked_at = now
        waited_until = max((_waited_until(beat.wait, now) for beat in heartbeats), default=0.0)
        starts = [max(beat.phase_start, waited_until, self._awake_since) for beat in heartbeats]
        limits = [beat.limit_seconds(min_seconds) for beat in heartbeats]
        return [rank for rank, limit in enumerate(limits) if now - starts[rank] > limit]


def without_waits_of_stopped(heartbeats: Sequence[HeartbeatRecord], pids: Mapping[int, int]) -> list[HeartbeatRecord]:
    """The records, without the known waits of ranks that a signal has stopped: what they wait for cannot end them."""
    return [
        beat._replace(wait=KnownWait()) if beat.wait.since and process_state(pids.get(rank, 0)) == "T" else beat
        for rank, beat in enumerate(heartbeats)
    ]


def _waited_until(wait: KnownWait, now: float) -> float:
    return min(now, wait.since + MAX_WAIT_SECONDS) if wait.since else wait.until


def kill_culprits(
    ranks: Sequence[int], heartbeats: Sequence[HeartbeatRecord], pids: Mapping[int, int], folder: Path
) -> Hang:
    """Kill the culprits and return what to report. `ranks` are the overdue ones."""
    seconds = max(time.monotonic() - heartbeats[rank].phase_start for rank in ranks)
    stopped = [rank for rank, pid in pids.items() if process_state(pid) == "T"]
    # Before its first step a rank may not handle the signal yet, which would then end it.
    has_handler = [rank for rank in stopped or pids if heartbeats[rank].phase != STARTING]
    stacks = _dump_stacks(has_handler, pids, folder)
    culprits = (
        stopped
        or [rank for rank in has_handler if not waits_for_peers(stacks.get(rank, "").splitlines())]
        or list(ranks)
    )
    for rank in culprits:
        _send_signal(pids[rank], signal.SIGKILL)
    return Hang(culprits, seconds, bool(stopped), stacks.get(culprits[0], ""))


def _dump_stacks(ranks: Sequence[int], pids: Mapping[int, int], folder: Path) -> dict[int, str]:
    """The stacks of these ranks. A stopped rank continues for as long as it takes to write its stack."""
    deadline = time.monotonic() + DUMP_SECONDS
    complete: dict[int, str] = {}
    while len(complete) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            # SIGCONT first, and both again: a signal that finds every thread stopped may wait for ever.
            _send_signal(pids[rank], signal.SIGCONT)
            _send_signal(pids[rank], DUMP_SIGNAL)
        resend_at = time.monotonic() + RESEND_SECONDS
        while len(complete) < len(ranks) and time.monotonic() < resend_at:
            time.sleep(POLL_SECONDS)
            texts = {rank: _read_text(stack_file(folder, rank)) for rank in ranks}
            complete = {rank: text for rank, text in texts.items() if text.endswith(STACK_ENDS)}
    return {rank: stack_of(text) for rank, text in complete.items()}


def stack_file(folder: Path, rank: int) -> Path:
    """The file to which a rank's faulthandler writes."""
    return folder / f"stack-{rank}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def stack_of(text: str) -> str:
    """The frames of the program, without Python's start-up frames: what the stack of a rank is, see above."""
    threads = [frames.splitlines() for frames in THREAD_TITLE.split(text)[1:]]
    main = next(index for index, frames in enumerate(threads) if f"{frames[-1]}\n".endswith(STACK_ENDS))
    reads = [frames for frames in threads[:main] if _is_in_feed(frames)] if _is_in_feed(threads[main]) else []
    shown = [*reads, threads[main]][0]
    return "\n".join(itertools.takewhile(lambda line: line.strip() and not STARTS_PYTHON.search(line), shown))


def _is_in_feed(frames: Sequence[str]) -> bool:
    return any(FEED_PATH in frame for frame in frames)


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
