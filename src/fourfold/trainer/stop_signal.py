"""Stop signals: SIGTERM and Ctrl-C (SIGINT) ask a run to save and end; a process that does not answer is ended.

request  the first signal: all ranks learn of it with the next step, save, and end together
repeat   a signal more than REPEAT_SECONDS after the request: it ends the process at once
overdue  no step, evaluation or checkpoint has ended within `stop_seconds` of the request: the process is ended
Law: all ranks answer a request between two steps; a process that does not get that far is ended anyway.

Python runs signal handlers in the main thread, between two of its instructions: never, if a step does not return. So a
thread listens too; the signal wakes it through Python's wakeup file descriptor. The thread needs the GIL: if a call
never releases that, only SIGKILL helps (fourfold's own launcher sends it).
"""

import _thread
import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fourfold.environment import early_sigterm
from fourfold.environment.world import World
from fourfold.trainer.heartbeat import MAX_FRAMES, Heartbeat, waits_for_peers
from fourfold.trainer.run_identity import resume_hint
from fourfold.words.errors import INTERRUPT_EXIT_CODE, REQUEUE_EXIT_CODE, Problem, SettingError

STOP_SECONDS_VARIABLE = "FOURFOLD_STOP_SECONDS"
STOP_SECONDS = 25.0  # below the 30 s that Slurm and Kubernetes leave between SIGTERM and SIGKILL
# One request may arrive as several signals: `timeout` signals its child and the child's process group, a launcher
# forwards a signal that its ranks have received too, and a wrapper forwards a Ctrl-C that the terminal has sent.
REPEAT_SECONDS = {signal.SIGTERM: 1.0, signal.SIGINT: 0.3}
EXIT_CODES = {signal.SIGTERM: REQUEUE_EXIT_CODE, signal.SIGINT: INTERRUPT_EXIT_CODE}
INTERRUPT_SECONDS = 3.0  # for a KeyboardInterrupt to end the training
SAVING_TEXT = "saving after this step, then ending; Ctrl-C again ends at once"
CLOSE_BYTE = 0  # no signal has this number: it ends the listening thread


def stop_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """How long a process that was asked to stop may go without finishing a step. Raises SettingError."""
    text = environ.get(STOP_SECONDS_VARIABLE, "")
    try:
        seconds = float(text or STOP_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise SettingError(
            Problem(f"{STOP_SECONDS_VARIABLE} = {text}", "a number of seconds above 0", f"{STOP_SECONDS_VARIABLE}=25")
        )
    return seconds


@contextlib.contextmanager
def handle_stop_signals(
    heartbeat: Heartbeat, run_dir: Path, world: World, *, limit_seconds: float
) -> Iterator[Callable[[], int]]:
    """Within: SIGTERM and Ctrl-C are requests to stop. The function yielded returns the request's signal, 0 before it.

    Signals that the user handles are left alone, and so are all signals outside the main thread. `limit_seconds`: see
    `stop_seconds`. Raises KeyboardInterrupt at a second Ctrl-C.
    """
    signals = _unhandled_signals() if threading.current_thread() is threading.main_thread() else []
    if not signals:
        yield lambda: 0
        return
    handler = StopSignalHandler(signals, heartbeat, run_dir, world, limit_seconds)
    handler.install()
    try:
        yield lambda: handler.signal_number
    finally:
        handler.uninstall()


def _unhandled_signals() -> list[signal.Signals]:
    """The stop signals that the user does not handle: Python's default handlers, or our own of a command's start."""
    default = {
        signal.SIGTERM: (signal.SIG_DFL, early_sigterm.exit_requeued),
        signal.SIGINT: (signal.default_int_handler,),
    }
    return [number for number, handlers in default.items() if signal.getsignal(number) in handlers]


class StopSignalHandler:
    """The requests to this process. `signal_number`: the first request's signal; 0 before it."""

    def __init__(
        self, signals: list[signal.Signals], heartbeat: Heartbeat, run_dir: Path, world: World, limit_seconds: float
    ) -> None:
        self.signal_number = 0
        self._limit_seconds, self._heartbeat, self._run_dir, self._world = limit_seconds, heartbeat, run_dir, world
        self._handlers = {number: signal.getsignal(number) for number in signals}
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._requested_at: float | None = None
        """When the request came, on the monotonic clock."""
        self._previous_wakeup_fd = -1
        """The wakeup file descriptor that was set before; -1: none."""
        self._interrupted_at: float | None = None
        """When a second Ctrl-C came."""
        self._thread = threading.Thread(target=self._watch, name="fourfold stop", daemon=True)

    def install(self) -> None:
        for number in self._handlers:
            signal.signal(number, self._on_signal)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        _active_handlers.append(self)
        self._thread.start()

    def uninstall(self) -> None:
        _active_handlers.remove(self)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        self.restore_handlers()
        os.write(self._write_fd, bytes([CLOSE_BYTE]))
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def restore_handlers(self) -> None:
        """Set the handlers from before `install`."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread. The listening thread decides what a signal means, by when it came."""
        self.signal_number = self.signal_number or number
        if self._interrupted_at is not None:
            raise KeyboardInterrupt

    # ---- the listening thread

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        while True:
            remaining = self._deadline() - time.monotonic()
            if poll.poll(None if remaining == math.inf else max(0.0, 1000 * remaining)):
                numbers = os.read(self._read_fd, 4096)
                if CLOSE_BYTE in numbers:
                    return
                for number in numbers:
                    self._on_wakeup_byte(number)
            if time.monotonic() >= self._deadline():
                self._exit_overdue()

    def _deadline(self) -> float:
        """When this process is ended."""
        # In a notebook or a Python prompt the process is more than this run.
        if self._requested_at is None or (self.signal_number == signal.SIGINT and hasattr(sys, "ps1")):
            return math.inf
        if self._interrupted_at is not None:
            return self._interrupted_at + INTERRUPT_SECONDS
        return max(self._requested_at, self._heartbeat.phase_start) + self._limit_seconds

    def _on_wakeup_byte(self, number: int) -> None:
        if number not in self._handlers:
            if self._previous_wakeup_fd >= 0:  # that of an event loop, which listens in the same way
                with contextlib.suppress(BlockingIOError):  # full, so its reader wakes up anyway
                    os.write(self._previous_wakeup_fd, bytes([number]))
            return
        if self._requested_at is None:
            self._requested_at, self.signal_number = time.monotonic(), number
            if number == signal.SIGINT and not self._heartbeat.has_reader and self._world.rank == 0:
                self._print(f"SIGINT: {SAVING_TEXT}")
        elif (
            self._interrupted_at is None
            and time.monotonic() - self._requested_at > REPEAT_SECONDS[signal.Signals(number)]
        ):
            if number == signal.SIGINT:
                self._interrupted_at = time.monotonic()
                _thread.interrupt_main(signal.SIGINT)
            else:
                self._exit(number, f"stopped at once by {signal.Signals(number).name}, the second request")

    def _exit_overdue(self) -> NoReturn:
        frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])[::-1][:MAX_FRAMES]
        number = self.signal_number if self._interrupted_at is None else signal.SIGINT
        if self._world.size > 1 and waits_for_peers(frame.filename for frame in frames):
            self._exit(number, "")  # the rank it waits for prints where it is
        why = f"stopped by {signal.Signals(number).name}: "
        limit = f"{self._limit_seconds:g} s ({STOP_SECONDS_VARIABLE})"
        overdue = f"no step, evaluation or checkpoint ended within {limit}{self._heartbeat.wait.clause}"
        why += "it did not end by itself" if self._interrupted_at is not None else overdue
        stack = "".join(traceback.format_list(frames)).rstrip()
        self._exit(number, why, f"\nit was here, innermost first\n{stack}")

    def _exit(self, number: int, text: str, details: str = "") -> NoReturn:
        try:
            if text:
                self._print(f"{text}; {resume_hint(self._run_dir)}{details}")
        finally:
            os._exit(EXIT_CODES[signal.Signals(number)])

    def _print(self, text: str) -> None:
        rank = f"rank {self._world.rank} of {self._world.size}: " if self._world.size > 1 else ""
        # Not through sys.stderr: a main thread that hangs may hold its lock.
        with contextlib.suppress(OSError):  # stderr is closed, or its disk is full: the request stands
            os.write(2, f"fourfold: {rank}{text}\n".encode(errors="replace"))


_active_handlers: list[StopSignalHandler] = []


def _restore_after_fork() -> None:
    """In a forked child: its signals are its own, and must not be written into a pipe of the parent's."""
    while _active_handlers:
        signal.set_wakeup_fd(-1)
        _active_handlers.pop().restore_handlers()
    early_sigterm.restore()


os.register_at_fork(after_in_child=_restore_after_fork)
