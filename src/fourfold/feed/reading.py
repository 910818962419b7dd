"""Reading: the batches of a source, as this process reads them, by a thread before they are needed.

on demand  an item is read only when it is requested: so are samples that draw random numbers, for no other code draws
           meanwhile
depth      how many items are read ahead: it grows when the loop had to wait although the reader had been idle, since
           then items take unequal times, and more of them ahead would have bridged the slow one
Law: which samples a batch has, and what is in them, depends on the request alone. Items read ahead and their order are
those of the iterator; its error is raised where the item is requested.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple, TypeVar

from fourfold.feed.data_input import DataInput
from fourfold.feed.readable import Fetched, fetch_readable
from fourfold.feed.sample_rng import fetch_seeded
from fourfold.feed.sharing.channel import IsOpen
from fourfold.feed.sharing.shared_reads import Form, Key, Loop, Reads
from fourfold.feed.source import pin_batch
from fourfold.feed.stream import Stream, StreamBatch, StreamPart
from fourfold.feed.transform import in_epoch
from fourfold.feed.workers import Request
from fourfold.plan.damaged_samples import DamagedRecord

# ---- ahead -----------------------------------------------------------------------------------------------------------


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
    read: Callable[[IsOpen], Iterator[Item]], *, is_on_demand: Callable[[], bool], check_peers: Callable[[], None]
) -> Generator[Item, None, None]:
    """The items of `read`, read by a thread PREFETCH_DEPTH to MAX_PREFETCH_DEPTH of them ahead; while
    `is_on_demand()`, none. `read` is told whether this loop is still open.

    The first item is always read on demand; `is_on_demand` is called after it. `check_peers` is called from time to
    time during a wait for an item; an error that it raises ends the wait.
    """
    ready = _Ahead()
    demand, stopped = threading.Semaphore(0), threading.Event()
    items = read(lambda: not stopped.is_set())

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


# ---- of a source -----------------------------------------------------------------------------------------------------


FETCHED = Form[Fetched](
    lambda each: (each.values, list(each.left_out), list(map(tuple, each.damaged))),
    lambda tree: Fetched(tree[0], tree[1], [DamagedRecord(*record) for record in tree[2]]),
)
STREAMED = Form[StreamBatch](tuple, lambda tree: StreamBatch(*tree))


class BatchReader:
    """Reads the batches of a source, by its workers if it has some."""

    def __init__(self, data: DataInput) -> None:
        self._input = data
        self.uses_rng = False
        """Whether samples that this process has read draw random numbers: then batches are read on demand."""

    def read(self, requests: Iterable[Request]) -> Iterator[Fetched]:
        """The batches of these samples, as far as they can be read."""
        if self._input.workers is not None:
            yield from self._input.workers.read(requests)
            return
        for number, request in enumerate(requests):
            fetched = self._fetch(request, is_first=number == 0)
            yield fetched._replace(values=pin_batch(fetched.values)) if self._input.pins_memory else fetched

    def _fetch(self, request: Request, *, is_first: bool) -> Fetched:
        """A batch. The first one shows whether samples draw random numbers: no other code draws while it is read."""
        assert not isinstance(self._input.source, Stream)
        source = in_epoch(self._input.source, request.seed, request.epoch)
        if not is_first and not self.uses_rng:
            return fetch_readable(source, request.numbers)
        options = {"seed": request.seed, "epoch": request.epoch, "uses_rng": self.uses_rng}
        batch, self.uses_rng = fetch_seeded(source, request.numbers, **options)
        return batch

    def read_stream(self, reads: Reads, part: StreamPart, is_open: IsOpen) -> Iterator[StreamBatch]:
        """This rank's part of the batches of a stream, from its first one on."""
        stream = self._input.source
        assert isinstance(stream, Stream)
        keys = (Key(part.seed, part.epoch, n, n + 1, f"a stream in batches of {part.batch_size}") for n in count())
        for each in reads.items(Loop(keys, lambda: stream.batches(part), STREAMED, is_open)):
            self.uses_rng = stream.uses_rng
            yield each
