"""Unpacked: what takes more memory than its file, such as a compressed shard, and how much of it there may be.

part   what is unpacked at once: a file, a shard, a row group; a JSON text
share  of a rank: the memory of this host, divided by its ranks
Law: nothing is unpacked that is larger than the share, however little of the disk it takes. All sources of a process
hold no more than the share together; the least recently used part goes first.
"""

import functools
import itertools
import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

from fourfold.environment.host_limits import total_bytes
from fourfold.environment.world import from_environment
from fourfold.words.errors import DataError, Problem
from fourfold.words.units import format_bytes

MAX_HELD = 4
# Of Python's objects at most, each with its place in a list or dict that grows: measured with CPython 3.11.
VALUE_BYTES, KEY_BYTES, DICT_BYTES = 96, 96, 128
T = TypeVar("T")


@functools.cache
def share_bytes() -> int:
    """What this rank may unpack at most. It does not depend on the load, so that what is damaged does not."""
    world = from_environment()
    total = total_bytes()
    return 2**63 if total is None else total // (world.local_size if world else 1)


def check_fits(num_bytes: int, what: str, *, times: int = 1) -> None:
    """Raise ValueError if something is said to unpack to more than the share. `times`: how often it is held at once."""
    if times * num_bytes > share_bytes():
        share, held = format_bytes(share_bytes()), f", held {times} times" if times > 1 else ""
        raise ValueError(f"{what} of {num_bytes} bytes{held}, and memory of {share} for each rank of this host")


def check_batch_fits(num_bytes: int, what: str, where: str) -> None:
    """Raise DataError if what a batch needs is more than the share: its samples are not damaged."""
    try:
        check_fits(num_bytes, what)
    except ValueError as error:
        raise DataError(Problem(str(error), "a batch that fits", "a smaller batch_size"), where=where) from None


class BatchBytes:
    """What the samples of a batch need, counted as they are made, in any thread."""

    def __init__(self, num_samples: int, where: str) -> None:
        self._num_samples, self._where = num_samples, where
        self._num_bytes, self._lock = 0, threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count some bytes. Raises DataError once they are more than the share."""
        with self._lock:
            self._num_bytes += num_bytes
        if self._num_bytes > share_bytes():
            check_batch_fits(self._num_bytes, f"a batch of {self._num_samples} samples or some of them", self._where)


def bytes_of(sample: Any) -> int:
    """The bytes of a sample's tensors, arrays and texts."""
    if isinstance(sample, Mapping | tuple | list):
        return sum(map(bytes_of, sample.values() if isinstance(sample, Mapping) else sample))
    return len(sample) if isinstance(sample, bytes | str) else getattr(sample, "nbytes", 0)


def load_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError if it is none, or if its objects may be larger than the share."""
    marks = (",", "[", "{", ":") if isinstance(content, str) else (b",", b"[", b"{", b":")
    commas, lists, dicts, keys = map(content.count, marks)  # type: ignore[arg-type]
    text = len(content) * (1 if content.isascii() else 4)  # one emoji in a text makes it so large
    objects = VALUE_BYTES * (commas + lists + dicts) + DICT_BYTES * dicts + KEY_BYTES * keys
    check_fits(text + objects, "the values of a JSON text")
    return json.loads(content)


class Unpacked(Generic[T]):
    """Parts of a source in memory: at most MAX_HELD."""

    def __init__(self) -> None:
        self._held = OrderedDict[Hashable, tuple[int, int, T]]()  # each with its last use and its bytes
        _SOURCES.add(self)

    def __reduce__(self) -> Any:  # to a worker process goes nothing that is unpacked
        return Unpacked, ()

    def get(self, key: Hashable, num_bytes: int, unpack: Callable[[], T]) -> T:
        """The part, from `unpack` if it is not held. Raises ValueError if its `num_bytes` are more than the share."""
        with _LOCK:  # one thread unpacks, and others wait for what they will need too
            _, num_bytes, part = self._held.pop(key, (0, num_bytes, None))
            if part is None:
                check_fits(num_bytes, "a part")
                if len(self._held) == MAX_HELD:
                    self._held.popitem(last=False)
                _make_room(num_bytes)
                part = unpack()
            self._held[key] = next(_USES), num_bytes, part
            return part


_SOURCES, _USES = weakref.WeakSet[Unpacked[Any]](), itertools.count()
_LOCK = threading.RLock()  # what is unpacked may have parts


def _renew_lock() -> None:
    """In a process that was forked while another thread unpacked."""
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _make_room(num_bytes: int) -> None:
    """Give up parts of any source until so much more fits."""
    while held := [source._held for source in _SOURCES if source._held]:
        if sum(part[1] for each in held for part in each.values()) + num_bytes <= share_bytes():
            return
        min(held, key=lambda each: next(iter(each.values()))[0]).popitem(last=False)
