"""Processes of this host, as the kernel describes them in /proc.

start ticks  when a process began, in clock ticks since the boot
Law: a process is known by its number and its start ticks, because the kernel gives a number to later processes again.
"""

import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

SET_PARENT_DEATH_SIGNAL, SET_NAME = 1, 15  # options of prctl
STATE, PARENT, START_TICKS = 0, 1, 19  # fields of /proc/PID/stat after the command's name


class ProcessId(NamedTuple):
    """A process; `start_ticks` is 0 where there is no process of this number."""

    pid: int
    start_ticks: int


def process_id(pid: int) -> ProcessId:
    fields = _stat_fields(pid)
    return ProcessId(pid, int(fields[START_TICKS]) if fields else 0)


def this_process() -> ProcessId:
    return process_id(os.getpid())


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether this process still runs. A zombie does not: it has ended, and only its parent has yet to notice."""
    fields = _stat_fields(pid)
    return bool(fields) and int(fields[START_TICKS]) == start_ticks and fields[STATE] not in ("Z", "X")


def process_state(pid: int) -> str:
    """The kernel's letter for a process's state: R, S, D, T (stopped), Z; "" where there is no such process."""
    fields = _stat_fields(pid)
    return fields[STATE] if fields else ""


def parent_pid(pid: int) -> int:
    """0 where there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[PARENT]) if fields else 0


def processor_delay_seconds() -> float:
    """How long this thread has waited for a processor while it was ready; 0 where the kernel does not say."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 100).split()[1]) / 1e9
    finally:
        os.close(file)


def has_variable(pid: int, name: str) -> bool:
    """Whether a process began with this environment variable; False where this user may not read its environment."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's, such as Slurm's own daemon
        return False
    return any(entry.startswith(name.encode() + b"=") for entry in environ.split(b"\0"))


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, state first; none where there is no such process."""
    try:
        # The command's name may hold spaces and brackets of its own: the last bracket ends it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, of this number, is gone, however it ended (Linux)."""
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:  # It ended before the line above.
        os._exit(1)


def leave_signals_to_parent() -> None:
    """From now on SIGTERM and SIGINT, which often go to all processes of a job, end this one only with its parent.

    The kernel sends one when the parent is gone (Linux). Not SIG_IGN, which programs that this process starts inherit.
    """
    parent = os.getppid()

    def end_if_left(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_if_left)
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def set_process_name(name: str) -> None:
    """What `top` and `ps -o comm` call this process (Linux). At most 15 bytes."""
    _prctl(SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)
