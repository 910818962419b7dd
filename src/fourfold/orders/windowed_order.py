"""Windowed order: shards in a random order, and within a window of a few of them their samples in a random order.

shard   consecutive samples that lie in one file
place   the index of a shard in the epoch's order of shards
window  the shards at so many consecutive places; the last window may have fewer
Law: every epoch visits each sample once, and reads a window's shards at no position outside the window. So storage that
reads whole files is asked for each file once per epoch, and a host keeps no more than two windows of them.

Memory: a few numbers for each shard.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fourfold.orders.keyed_permutation import derive_keys, permute
from fourfold.orders.sample_order import digest_of
from fourfold.words.errors import Problem

WINDOWED_VERSION = 1
NUM_CACHED_EPOCHS = 2  # a mixture may be at the end of one and the beginning of the next


def window_problems(shard_sizes: Any, window: Any, num_samples: int) -> list[Problem]:
    """Why there is no windowed order over shards of these sizes. `window` is an int above 0."""
    need = "a source that says how many samples each of its files has"
    attempt = "a pack, or order='global'"
    if shard_sizes is None:
        return [Problem("order = 'windowed', and a source without shard_sizes", need, attempt)]
    try:
        sizes = np.asarray(shard_sizes)
    except ValueError:
        sizes = np.asarray("")
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes.size and sizes.min() < 0):
        return [Problem("shard_sizes that are not whole numbers", need, attempt)]
    if sizes.sum() != num_samples:
        return [Problem(f"shard_sizes that sum to {sizes.sum()}", f"{num_samples}, the samples of the source")]
    if window > len(sizes):
        got = f"window = {window}, and a source of {len(sizes)} shards"
        return [Problem(got, "a window of some of the shards", f"window={len(sizes)}, or order='global'")]
    return []


class _Epoch(NamedTuple):
    """The shards of an epoch by place, and the first position of each; at last the number of samples."""

    shards: np.ndarray
    starts: np.ndarray

    def place(self, position: int) -> int:
        """At which place the shard of a position is."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1


class WindowedOrder:
    """The windowed order over shards of these sizes, which `window_problems` has checked."""

    kind, version = "windowed", WINDOWED_VERSION

    def __init__(self, shard_sizes: Sequence[int] | np.ndarray, window: int) -> None:
        self._sizes, self._window = np.asarray(shard_sizes, dtype=np.int64), window
        stops = np.cumsum(self._sizes)
        self.num_positions, self._first_ids = int(stops[-1]), stops - self._sizes
        self._epochs: dict[tuple[int, int], _Epoch] = {}

    @property
    def num_shards(self) -> int:
        return len(self._sizes)

    def ids_at(self, seed: int, epoch: int, positions: np.ndarray, /) -> np.ndarray:
        if not len(positions):
            return positions
        shards, all_starts = found = self._epoch(seed, epoch)
        first, last = (found.place(int(end)) // self._window for end in (positions.min(), positions.max()))
        # Tables of the windows that the positions lie in, which are few: positions are asked for in ranges.
        edges = all_starts[np.minimum(np.arange(first, last + 2) * self._window, self.num_shards)]
        windows = np.searchsorted(edges, positions, side="right") - 1
        keys = derive_keys("fourfold windowed order", WINDOWED_VERSION, "samples", seed, epoch)
        sizes = np.diff(edges)
        shuffled = edges[windows] + permute(positions - edges[windows], sizes[windows], keys, windows + first)
        places = self._places(first, last)
        starts = all_starts[places]
        indices = np.searchsorted(starts, shuffled, side="right") - 1
        return (self._first_ids[shards[places]] - starts)[indices] + shuffled

    def _places(self, first_window: int, last_window: int) -> np.ndarray:
        return np.arange(first_window * self._window, min((last_window + 1) * self._window, self.num_shards))

    def shards_of(self, seed: int, epoch: int, start: int, stop: int) -> list[int]:
        """The shards that positions [start, stop) of an epoch may read, window after window."""
        if start == stop:
            return []
        found = self._epoch(seed, epoch)
        first, last = (found.place(end) // self._window for end in (start, stop - 1))
        return found.shards[self._places(first, last)].tolist()

    def description(self) -> str:
        return f"windowed, window {self._window} of {self.num_shards} shards"

    def digest(self) -> str:
        return digest_of(self.kind, self.version, self._window, self._sizes)

    def _epoch(self, seed: int, epoch: int) -> _Epoch:
        """The shards of an epoch; those of the last ones are kept."""
        known = self._epochs.get((seed, epoch))
        if known is None:
            keys = derive_keys("fourfold windowed order", WINDOWED_VERSION, "shards", seed, epoch)
            shards = permute(np.arange(self.num_shards), self.num_shards, keys)
            known = _Epoch(shards, np.concatenate([[0], np.cumsum(self._sizes[shards])]))
            newest = list(self._epochs.items())[1 - NUM_CACHED_EPOCHS :]
            self._epochs = {**dict(newest), (seed, epoch): known}
        return known
