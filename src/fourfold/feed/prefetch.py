"""Ahead: items that a thread makes, in front of who takes them.

in turn  an item is made while it is waited for, and not before
Law: the items and their order are those of the iterator; its error is raised where the item is waited for.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeVar

PREFETCH_DEPTH = 2
PEER_CHECK_SECONDS = 0.25
POLL_SECONDS = 0.1
JOIN_TIMEOUT_SECONDS = 1.0  # a source that does not answer must not keep its rank; the thread ends with the process

Item = TypeVar("Item")


class _Failed(NamedTuple):
    error: BaseException


_END = object()


def prefetch(
    items: Iterator[Item], *, is_on_demand: Callable[[], bool], check_peers: Callable[[], None]
) -> Generator[Item, None, None]:
    """The items, made by a thread that stays `READ_AHEAD` of them in front; where `in_turn()` none.

    The first one is made in turn in any case: `in_turn` is asked when it has been made. `look` is called from time to
    time while an item is waited for: what it raises ends the waiting.
    """
    ready: queue.Queue[Any] = queue.Queue(PREFETCH_DEPTH)
    wanted, stopped = threading.Semaphore(0), threading.Event()

    def make() -> None:
        try:
            is_first = True
            while not (is_first or is_on_demand()) or _wait_for_demand(wanted, stopped):
                is_first, item = False, next(items, _END)
                if not _put_item(ready, item, stopped) or item is _END:
                    return
        except BaseException as error:  # raised in the caller's thread, below
            _put_item(ready, _Failed(error), stopped)

    thread = threading.Thread(target=make, name="fourfold feed", daemon=True)
    thread.start()
    try:
        wanted.release()
        while (item := _get_item(ready, check_peers)) is not _END:
            if isinstance(item, _Failed):
                raise item.error
            yield item
            wanted.release()
    finally:
        stopped.set()
        thread.join(JOIN_TIMEOUT_SECONDS)


def _get_item(ready: queue.Queue[Any], look: Callable[[], None]) -> Any:
    while True:
        try:
            return ready.get(timeout=PEER_CHECK_SECONDS)
        except queue.Empty:
            look()


def _wait_for_demand(wanted: threading.Semaphore, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        if wanted.acquire(timeout=POLL_SECONDS):
            return True
    return False


def _put_item(ready: queue.Queue[Any], item: Any, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            ready.put(item, timeout=POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False
