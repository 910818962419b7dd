"""Stretches: work on a list of samples, in threads.

stretch  consecutive samples of a list, which one thread works on
Law: all threads have ended when an error is raised, and it is the first one in the order of the samples.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class StretchThreads:
    """Threads that are kept. Safe to use from several threads, and after a fork, which none of them survives."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads, self._name = num_threads, name
        self._pool: ThreadPoolExecutor | None = None
        self._process, self._lock = 0, threading.Lock()

    def run(self, length: int, count: int, work: Callable[[int, int], None]) -> None:
        """Call `work(start, stop)` for `count` stretches of a list of this length."""
        bounds = [length * part // count for part in range(count + 1)]
        # This thread works too: handing over and waiting costs more than one stretch.
        others = [self._executor().submit(work, *bounds[part : part + 2]) for part in range(1, count)]
        try:
            work(*bounds[:2])
        finally:
            errors = [other.exception() for other in others]
        for error in filter(None, errors):
            raise error

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._process != os.getpid():
                self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix=self._name)
                self._process = os.getpid()
            return self._pool
