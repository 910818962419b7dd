"""Watch: finds the rank that holds all others up.

culprit  a rank that has been stopped (SIGSTOP); else one that does not wait for others; else whoever is late
stack    where a culprit was, as Python's faulthandler tells it on SIGUSR2
Law: a culprit is killed with SIGKILL: a stopped process does not hear SIGTERM.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.environment.processes import process_state
from fourfold.trainer.heartbeat import STARTING, HeartbeatRecord

STACKS_VARIABLE = "FOURFOLD_STACKS"
DUMP_SIGNAL = signal.SIGUSR2
DUMP_SECONDS, RESEND_SECONDS = 3.0, 0.1
POLL_SECONDS = 0.002
STACK_ENDS = (" in _run_module_as_main\n", "  ...\n")  # the outermost frame, or very many
MAX_FRAMES = 6
COMM_PATH = os.path.join("fourfold", "parts", "comm") + os.sep


@dataclass(frozen=True)
class Hang:
    """Ranks that held the others up. `stopped`: by a signal."""

    ranks: Sequence[int]
    seconds: float
    is_stopped: bool
    stack: str


def overdue_ranks(heartbeats: Sequence[HeartbeatRecord], *, min_seconds: float, now: float) -> list[int]:
    """The ranks that have been at the same thing for too long."""
    return [rank for rank, beat in enumerate(heartbeats) if now - beat.phase_start > beat.limit_seconds(min_seconds)]


def kill_culprits(
    ranks: Sequence[int], heartbeats: Sequence[HeartbeatRecord], pids: Mapping[int, int], folder: Path
) -> Hang:
    """Kill those who hold the others up, of which `ranks` are known to be late; afterwards, what there is to say."""
    seconds = max(time.monotonic() - heartbeats[rank].phase_start for rank in ranks)
    stopped = [rank for rank, pid in pids.items() if process_state(pid) == "T"]
    # Before its first step a rank may not listen yet, and the signal would end it.
    listening = [rank for rank in stopped or pids if heartbeats[rank].phase != STARTING]
    stacks = _dump_stacks(listening, pids, folder)
    culprits = stopped or [rank for rank in listening if not _is_waiting(stacks.get(rank, ""))] or list(ranks)
    for rank in culprits:
        _send_signal(pids[rank], signal.SIGKILL)
    return Hang(culprits, seconds, bool(stopped), stacks.get(culprits[0], ""))


def _dump_stacks(ranks: Sequence[int], pids: Mapping[int, int], folder: Path) -> dict[int, str]:
    """What ranks are at. One that was stopped goes on for the moment it takes to say so."""
    deadline = time.monotonic() + DUMP_SECONDS
    found: dict[int, str] = {}
    while len(found) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            # In this order, and again: a signal that finds every thread stopped may wait for ever.
            _send_signal(pids[rank], signal.SIGCONT)
            _send_signal(pids[rank], DUMP_SIGNAL)
        again = time.monotonic() + RESEND_SECONDS
        while len(found) < len(ranks) and time.monotonic() < again:
            time.sleep(POLL_SECONDS)
            told = {rank: _read_text(stack_file(folder, rank)) for rank in ranks}
            found = {rank: text for rank, text in told.items() if text.endswith(STACK_ENDS)}
    return {rank: _program_frames(text) for rank, text in found.items()}


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank's faulthandler writes."""
    return folder / f"stack-{rank}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _program_frames(text: str) -> str:
    """The frames of the program, without the thread's number and what had led to the program."""
    frames = itertools.takewhile(lambda line: "<frozen runpy>" not in line, text.splitlines()[1:])
    return "\n".join(frames)


def _is_waiting(stack: str) -> bool:
    return any(COMM_PATH in line for line in stack.splitlines()[:MAX_FRAMES])


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
