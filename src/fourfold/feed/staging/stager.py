"""Stager: shards are copied to the node's disk ahead of the batches that need them.

expected  the shards of each batch to come, in the order of the batches: the order of samples is known
ahead     the expected batches whose shards are copied, or being copied, before the batch is read
held      a copy that a batch ahead needs: it is open, so it is not evicted
Law: staging changes where bytes are read from and when, never which. A shard without a copy, because there is no room
or its turn has not come, is read from the origin.

Every process of a node has a stager of its own; the cache gives them one copy.
"""

import enum
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from fourfold.environment.known_waits import waiting_for
from fourfold.feed.staging.origin import Origin
from fourfold.feed.staging.shard_cache import NoRoomError, Shard, ShardCache, StagedFile
from fourfold.words.errors import DataError

log = logging.getLogger("fourfold")

NUM_AHEAD = 64
NUM_COPY_THREADS = 2
ROOM_POLL_SECONDS = 0.2


class _State(enum.Enum):
    QUEUED = enum.auto()
    COPYING = enum.auto()
    LACKS_ROOM = enum.auto()
    DONE = enum.auto()


class _Copy:
    """The copy of one shard, from when a batch ahead needs it until none does."""

    def __init__(self, shard: int) -> None:
        self.shard, self.state = shard, _State.QUEUED
        self.is_wanted = True
        self.staged: StagedFile | None = None
        self.error: DataError | OSError | None = None


class Stager:
    """The copies of one data set that one process holds, and the threads that make them."""

    def __init__(
        self,
        origin: Origin,
        shards: Sequence[Shard],
        cache: ShardCache,
        batches: Iterable[Sequence[int]],
        *,
        num_ahead: int = NUM_AHEAD,
    ) -> None:
        """Stage the shards of these batches."""
        self._origin, self._shards, self._cache, self._num_ahead = origin, shards, cache, num_ahead
        self._expected, self.is_closed = iter(batches), False
        self._ahead: deque[set[int]] = deque()
        self._num_needs: Counter[int] = Counter()
        """By shard: how many of the batches ahead need it."""
        self._copies: dict[int, _Copy] = {}
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        """Held to change a copy, notified when one has changed."""
        # Then a shard that was read before its copy was made is copied all the same, for the next epoch.
        self._keeps_all = sum(shard.num_bytes for shard in shards) <= cache.max_bytes
        for number in range(NUM_COPY_THREADS):
            # Not waited for at the end of the process: an origin may take long to give up.
            threading.Thread(target=self._run, name=f"fourfold staging {number}", daemon=True).start()
        self._look_ahead()

    def advance(self) -> None:
        """The first of the expected batches has been read."""
        done = self._ahead.popleft() if self._ahead else set()
        self._num_needs.subtract(done)
        self._give_up({shard for shard in done if self._num_needs[shard] <= 0})
        self._look_ahead()

    def held(self, shard: int, *, is_read_whole: bool = False) -> StagedFile | None:
        """The copy of a shard that the next expected batch needs; None: read it from the origin.

        Waits for a copy that is being made; if the shard `is_read_whole`, also for one that is still to be made, as
        long as there is room: the same bytes would come from the origin anyhow. Raises DataError if the shard is not
        what its manifest says.
        """
        with self._changed:
            copy = self._copies.get(shard)
            if copy is None:
                return None
            with waiting_for(f"the copy of {self._shards[shard].name} from {self._origin.url}"):
                if is_read_whole:
                    self._changed.wait_for(lambda: copy.state is not _State.QUEUED or self._lacks_room())
                self._changed.wait_for(lambda: copy.state is not _State.COPYING)
            if copy.error is not None:
                raise copy.error
            return copy.staged

    def open(self, shard: int) -> StagedFile | None:
        """The same, opened once more: it stays open when the stager gives its own up."""
        with self._changed:
            held = self.held(shard)
            # It may have been given up while this thread waited for it.
            return None if held is None or held.is_closed else held.again()

    def close(self) -> None:
        """End staging, and give up all copies. If the cache holds all shards, copies that were begun here are made."""
        self.is_closed = True
        self._give_up(set(self._copies))
        self._ahead.clear()
        self._expected = iter(())
        for _ in range(NUM_COPY_THREADS):
            self._queue.put(None)

    def _lacks_room(self) -> bool:
        return any(copy.state is _State.LACKS_ROOM for copy in self._copies.values())

    def _look_ahead(self) -> None:
        while len(self._ahead) < self._num_ahead and (batch := next(self._expected, None)) is not None:
            self._ahead.append(set(batch))
            self._num_needs.update(self._ahead[-1])
            for shard in sorted(self._ahead[-1] - self._copies.keys()):
                self._copies[shard] = copy = _Copy(shard)
                self._open(copy)
                if copy.state is _State.QUEUED:
                    self._queue.put(copy)

    def _open(self, copy: _Copy) -> None:
        """Hold the copy that the cache has already, so that nothing is read from the origin until a thread is free."""
        try:
            copy.staged = self._cache.open(self._shards[copy.shard])
        except (DataError, OSError) as error:  # raised where the shard is read
            copy.error = error
        if copy.staged is not None or copy.error is not None:
            copy.state = _State.DONE

    def _give_up(self, shards: set[int]) -> None:
        with self._changed:
            for shard in shards:
                del self._num_needs[shard]
                copy = self._copies.pop(shard)
                copy.is_wanted = False
                if copy.staged is not None:
                    copy.staged.close()
            self._changed.notify_all()

    # ---- in the threads that copy ----------------------------------------------------------------------

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            try:
                staged = self._make(copy)
            except (DataError, OSError) as error:  # raised where the shard is read
                staged, copy.error = None, error
            with self._changed:
                copy.state = _State.DONE
                if staged is not None and copy.is_wanted:
                    copy.staged = staged
                elif staged is not None:
                    staged.close()
                self._changed.notify_all()

    def _make(self, copy: _Copy) -> StagedFile | None:
        """The copy, once there is room for it; None if it is no longer needed."""
        while copy.is_wanted or self._keeps_all:
            self._set_state(copy, _State.COPYING)
            try:
                return self._cache.copy(self._shards[copy.shard], self._origin.read)
            except NoRoomError:
                if not copy.is_wanted:
                    return None
                self._set_state(copy, _State.LACKS_ROOM)
                self._log_room(copy)
            with self._changed:
                self._changed.wait_for(lambda: not copy.is_wanted, timeout=ROOM_POLL_SECONDS)
        return None

    def _set_state(self, copy: _Copy, state: _State) -> None:
        with self._changed:
            copy.state = state
            self._changed.notify_all()

    def _log_room(self, copy: _Copy) -> None:
        if self._cache.has_logged_room:
            return
        self._cache.has_logged_room = True
        name = self._shards[copy.shard].name
        log.warning(f"{self._cache.folder} has no room for {name}: what it cannot hold is read from {self._origin.url}")
