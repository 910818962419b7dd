"""Forked process: a copy of this process, which runs a function and ends.

fork   what this process has imported is there already: starting a copy takes milliseconds, importing torch a second
Law: the copy never returns into the code that forked it, and runs none of its `finally` blocks; it has no descriptor
of this process but the three standard ones and those that it is told to keep, and Python's own signal handlers.

Fork only where no other thread of this process holds a lock that the copy needs: the copy has this one thread.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from fourfold.environment.standard_streams import flush_streams
from fourfold.launcher.failure_report import exit_code

FIRST_OWN_DESCRIPTOR = 3
POLL_SECONDS = 0.01


class ForkedProcess:
    """A child of this process. It has what torch's agent uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, minus the number of the signal that killed it; None while it runs."""
        if self.returncode is None:
            # A signal's handler may raise between these lines: the status is there until the last has got it.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self.returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                os.waitpid(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired if it still runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def kill(self) -> None:
        """Kill it, if it still runs, and wait for its end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def fork(main: Callable[[], Any], *, keep: Collection[int] = (), new_session: bool = False) -> ForkedProcess:
    """Run `main` in a copy of this process. The copy's exit code is 0, or that of the `SystemExit` that `main` raises.

    keep         descriptors that stay open in the copy
    new_session  the copy leads a session and a process group of its own, from before this returns
    """
    flush_streams()  # or the copy writes what is in the buffers a second time
    reader, writer = os.pipe()
    # A signal that came before the copy has its own handlers would run this process's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = 0
    try:
        pid = os.fork()
        if pid == 0:
            _run(main, before, keep, new_session=new_session)
        os.close(writer)
        os.read(reader, 1)  # nothing, when the copy has closed its end
    finally:
        os.close(reader)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # a handler's, for a signal that came meanwhile: nobody else knows of the copy
            if pid:
                ForkedProcess(pid).kill()
            raise
    return ForkedProcess(pid)


def _run(main: Callable[[], Any], signal_mask: Iterable[int], keep: Collection[int], *, new_session: bool) -> NoReturn:
    code = 1
    try:
        if new_session:
            os.setsid()
        _restore_signal_handlers()
        _close_descriptors(keep)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        _reseed()
        main()
        code = 0
    except SystemExit as leaving:
        code = exit_code(leaving)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _restore_signal_handlers() -> None:
    """Python's own handlers, as in a new process; what was ignored stays ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _close_descriptors(keep: Collection[int]) -> None:
    names = os.listdir("/proc/self/fd") if sys.platform == "linux" else map(str, range(256))
    for number in map(int, names):
        if number >= FIRST_OWN_DESCRIPTOR and number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)


def _reseed() -> None:
    """A new process draws other numbers than the next one, where nobody has set a seed. `random` does so by itself."""
    numpy_random = sys.modules.get("numpy.random")  # numpy imports it when it is first used
    if numpy_random is not None:
        numpy_random.seed()


def _end(code: int) -> NoReturn:
    """End as Python does: threads, functions of atexit, streams; but without freeing every object."""
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    finally:
        flush_streams()
        os._exit(code)
