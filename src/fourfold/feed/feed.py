"""Feed: the batches of one rank, read ahead by a thread.

state  (seed, epoch, position): what has been handed out; ranks and read-ahead are no part of it
share  this data index's part of each global batch; when a batch does not divide, shares differ by one
Law: over all data indices the samples of a global batch are `plan.order.rows` of its positions, whatever the mesh.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

from fourfold.feed.samples import source_problem
from fourfold.feed.source import fetch
from fourfold.parts import comm
from fourfold.plan.order import Stretch, share
from fourfold.plan.plan import Plan
from fourfold.words import arguments
from fourfold.words.errors import DataError, Problem
from fourfold.words.task import Source

READ_AHEAD = 2
LOOK_SECONDS = 0.25
JOIN_SECONDS = 1.0  # a source that does not answer must not keep its rank; the thread ends with the process


class Position(NamedTuple):
    """Where a feed stands: samples [0, position) of the epoch have been handed out."""

    seed: int
    epoch: int
    position: int


class Batch(tuple):
    """A pair (inputs, targets) that knows which samples it holds: errors then name them."""

    samples: Stretch

    @classmethod
    def of(cls, values: Any, samples: Stretch) -> Any:
        """A pair or a dict that knows its samples; whatever else a source makes of samples is left as it is."""
        if isinstance(values, Mapping):
            batch = DictBatch(values)
        elif type(values) in (tuple, list) and len(values) == 2:
            batch = cls(values)
        else:
            return values
        batch.samples = samples
        return batch


class DictBatch(dict[str, Any]):
    """A dict of inputs that knows which samples it holds."""

    samples: Stretch


class Feed:
    """Iterate over an epoch's local batches; the next loop is the next epoch. `batch_size` is global.

    An epoch's last batch holds what is left; a data index may then get an empty batch, which a step takes.
    Raises DataError for an empty source or a batch size below one.
    """

    def __init__(self, source: Source, plan: Plan | None = None, *, batch_size: int, seed: int = 0) -> None:
        found = source_problem(source, "source")
        problems = [] if found is None else [found]
        problems += arguments.whole("batch_size", batch_size, least=1) + arguments.seed(seed)
        problems += arguments.instance("plan", plan, Plan, optional=True, attempt="ff.Plan(dp=2)")
        if problems:
            raise DataError(problems, where="the feed")
        self._source, self._batch_size = source, int(batch_size)
        self._size, self._index = _place(plan)
        self._state = Position(int(seed), 0, 0)
        self.look: Callable[[], None] = _nothing
        """Called from time to time while a batch is waited for: what it raises ends the waiting."""

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self._batch_size

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self._source)

    @property
    def state(self) -> Position:
        """What has been handed out so far; `load` puts a feed there, on any number of ranks."""
        return self._state

    def load(self, state: Position) -> None:
        """Go on from a state that another feed of the same source and batch size gave.

        Within a loop over the feed the next batch is from there; in another epoch the loop ends, and the next begins.
        """
        if not isinstance(state, tuple | list) or len(state) != 3 or not all(map(arguments.is_whole, state)):
            got = f"a state {state!r}"
            raise DataError(Problem(got, "(seed, epoch, position), as another feed's `state` is"), where="the feed")
        position = Position(*state)
        if not 0 <= position.position < len(self._source):
            got = f"position {position.position}"
            raise DataError(Problem(got, f"one before the source's {len(self._source)} samples"), where="the feed")
        self._state = position

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._source) // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch. The state advances when a batch is taken, not when it is read."""
        epoch = self._state.epoch
        while self._state.epoch == epoch:
            for after, batch in self._read_ahead(self._state):
                self._state = after
                yield batch
                if self._state is not after or after.epoch != epoch:
                    break  # the epoch is over, or `load` has put the feed elsewhere

    def forever(self) -> Generator[Any, None, None]:
        """Batches without end, epoch after epoch."""
        while True:
            yield from self

    def _batches(self, start: Position) -> Iterator[tuple[Position, Any]]:
        """The rest of an epoch: what the state is after each batch, and the batch."""
        num_samples, (seed, epoch, position) = len(self._source), start
        while position < num_samples:
            stop = min(position + self._batch_size, num_samples)
            first, last = share(position, stop, self._size, self._index)
            samples = Stretch(num_samples, seed, epoch, position, stop, first, last)
            batch = Batch.of(fetch(self._source, samples.ids()), samples)
            position = stop
            after = Position(seed, epoch, position) if position < num_samples else Position(seed, epoch + 1, 0)
            yield after, batch

    def _read_ahead(self, start: Position) -> Iterator[tuple[Position, Any]]:
        """`_batches`, made by a thread that stays `READ_AHEAD` batches in front; its error is raised here."""
        ready: queue.Queue[Any] = queue.Queue(READ_AHEAD)
        stopped = threading.Event()

        def read() -> None:
            try:
                for item in self._batches(start):
                    if not _put(ready, item, stopped):
                        return
                _put(ready, None, stopped)
            except BaseException as error:  # raised in the caller's thread, below
                _put(ready, error, stopped)

        thread = threading.Thread(target=read, name="fourfold feed", daemon=True)
        thread.start()
        try:
            while (item := self._next(ready)) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            thread.join(JOIN_SECONDS)

    def _next(self, ready: queue.Queue[Any]) -> Any:
        while True:
            try:
                return ready.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self.look()


def _nothing() -> None: ...


def _put(ready: queue.Queue[Any], item: Any, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _place(plan: Plan | None) -> tuple[int, int]:
    """Size of the data axis and this process's index on it."""
    world = comm.world()
    if plan is None:
        return world.size, world.rank
    return plan.dp, plan.mesh.at(world.rank)["dp"]
