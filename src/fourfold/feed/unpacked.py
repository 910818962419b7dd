"""Unpacked: what takes more memory than its file, such as a compressed shard, and how much of it there may be.

part   what is unpacked at once: a file, a shard, a row group; a JSON text
share  of a rank: the memory of this host, divided by its ranks
Law: nothing is unpacked that is larger than the share, however little of the disk it takes; of what is held, the least
recently used goes first.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from fourfold.environment.host_limits import total_bytes
from fourfold.environment.world import from_environment
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


def check_fits(num_bytes: int, what: str) -> None:
    """Raise ValueError if something is said to unpack to more than the share."""
    if num_bytes > share_bytes():
        share = format_bytes(share_bytes())
        raise ValueError(f"{what} of {num_bytes} bytes, and memory of {share} for each rank of this host")


def load_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError if it is none, or if its objects may be larger than the share."""
    marks = (",", "[", "{", ":") if isinstance(content, str) else (b",", b"[", b"{", b":")
    commas, lists, dicts, keys = map(content.count, marks)  # type: ignore[arg-type]
    text = len(content) * (1 if content.isascii() else 4)  # one emoji in a text makes it so large
    objects = VALUE_BYTES * (commas + lists + dicts) + DICT_BYTES * dicts + KEY_BYTES * keys
    check_fits(text + objects, "the values of a JSON text")
    return json.loads(content)


class Unpacked(Generic[T]):
    """Parts in memory: at most MAX_HELD, and all together no more than the share."""

    def __init__(self) -> None:
        self._held, self._lock = OrderedDict[Hashable, tuple[int, T]](), threading.Lock()

    def __reduce__(self) -> Any:  # to a worker process goes nothing that is unpacked
        return Unpacked, ()

    def get(self, key: Hashable, num_bytes: int, unpack: Callable[[], T]) -> T:
        """The part, from `unpack` if it is not held. Raises ValueError if its `num_bytes` are more than the share."""
        with self._lock:  # one thread unpacks, and others wait for what they will need too
            part = self._held.pop(key, None)
            if part is None:
                check_fits(num_bytes, "a part")
                while self._held and (len(self._held) == MAX_HELD or self._num_bytes() + num_bytes > share_bytes()):
                    self._held.popitem(last=False)
                part = num_bytes, unpack()
            self._held[key] = part
            return part[1]

    def _num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._held.values())
