"""Prefetch: a thread reads items of an iterator before they are needed.

on demand  an item is read only when it is requested
depth      how many items are read ahead: it grows when the loop had to wait although the reader had been idle, since
           then items take unequal times, and more of them ahead would have bridged the slow one
Law: items and their order are those of the iterator; its error is raised where the item is requested.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeVar

PREFETCH_DEPTH, MAX_PREFETCH_DEPTH = 2, 4
PEER_CHECK_SECONDS = 0.25
POLL_SECONDS = 0.1
JOIN_TIMEOUT_SECONDS = 1.0  # a source that hangs must not hold up its rank; the thread ends with the process

Item = TypeVar("Item")


class _Failed(NamedTuple):
    error: BaseException


_END = object()


class _Ahead(queue.Queue[Any]):
    """The items that have been read ahead."""

    def __init__(self) -> None:
        super().__init__(PREFETCH_DEPTH)
        self._reader_was_idle = False

    def note_full(self) -> None:
        """The reader has an item and no room for it: it is idle until the loop takes one."""
        self._reader_was_idle = self._reader_was_idle or self.full()

    def note_wait(self) -> None:
        """The loop waits for an item."""
        with self.mutex:
            if self._reader_was_idle and self.maxsize < MAX_PREFETCH_DEPTH:
                self.maxsize += 1
                self._reader_was_idle = False


def prefetch(
    items: Iterator[Item], *, is_on_demand: Callable[[], bool], check_peers: Callable[[], None]
) -> Generator[Item, None, None]:
    """The items, read by a thread PREFETCH_DEPTH to MAX_PREFETCH_DEPTH of them ahead; while `is_on_demand()`, none.

    The first item is always read on demand; `is_on_demand` is called after it. `check_peers` is called from time to
    time during a wait for an item; an error that it raises ends the wait.
    """
    ready = _Ahead()
    demand, stopped = threading.Semaphore(0), threading.Event()

    def read_items() -> None:
        try:
            is_first = True
            while not (is_first or is_on_demand()) or _wait_for_demand(demand, stopped):
                is_first, item = False, next(items, _END)
                if not _put_item(ready, item, stopped) or item is _END:
                    return
        except BaseException as error:  # raised in the caller's thread, below
            _put_item(ready, _Failed(error), stopped)

    thread = threading.Thread(target=read_items, name="fourfold feed", daemon=True)
    thread.start()
    try:
        demand.release()
        while (item := _get_item(ready, check_peers)) is not _END:
            if isinstance(item, _Failed):
                raise item.error
            yield item
            demand.release()
    finally:
        stopped.set()
        thread.join(JOIN_TIMEOUT_SECONDS)


def _get_item(ready: _Ahead, check_peers: Callable[[], None]) -> Any:
    if ready.empty():
        ready.note_wait()
    while True:
        try:
            return ready.get(timeout=PEER_CHECK_SECONDS)
        except queue.Empty:
            check_peers()


def _wait_for_demand(demand: threading.Semaphore, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        if demand.acquire(timeout=POLL_SECONDS):
            return True
    return False


def _put_item(ready: _Ahead, item: Any, stopped: threading.Event) -> bool:
    ready.note_full()
    while not stopped.is_set():
        try:
            ready.put(item, timeout=POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False
