"""Sample order: which sample each rank trains on at each step, as a pure function of (seed, epoch, position).

position  an index into the epoch's global order, 0 to num_samples − 1
id        the sample at a position: a keyed bijection (Feistel network with cycle-walking)
shard     the consecutive part of a range of positions that one index of an axis takes
Law: every epoch visits each sample once; neither the number of ranks nor the batch size changes the order.

Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), §3 cycle-walking, §4 Feistel.
"""

import hashlib
from typing import NamedTuple

import numpy as np

ORDER_VERSION = 1
UNSHUFFLED = 0  # stands for the version of the order where samples come as the source has them
FEISTEL_ROUNDS = 8
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


def rows(num_samples: int, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    """Sample ids at positions [start, stop) of an epoch: int64 [stop − start], without O(num_samples) memory."""
    if not 0 <= start <= stop <= num_samples:
        raise IndexError(f"positions {start} to {stop} are outside an epoch of {num_samples} samples")
    half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    keys = _keys(seed, epoch)
    ids = _permute(np.arange(start, stop, dtype=np.uint64), half, keys)
    outside = np.flatnonzero(ids >= num_samples)
    while outside.size:
        ids[outside] = _permute(ids[outside], half, keys)
        outside = outside[ids[outside] >= num_samples]
    return ids.astype(np.int64)


class BatchRange(NamedTuple):
    """A global batch: positions [start, stop) of an epoch's order. A rank takes [local_start, local_stop) of them."""

    num_samples: int
    seed: int
    epoch: int
    start: int
    stop: int
    local_start: int
    local_stop: int

    def __str__(self) -> str:
        return f"positions {self.start} to {self.stop} of epoch {self.epoch}, seed {self.seed}"

    def sample_ids(self) -> list[int]:
        """The ids of this rank's samples."""
        return rows(self.num_samples, self.seed, self.epoch, self.local_start, self.local_stop).tolist()


class InOrderRange(BatchRange):
    """A global batch of an epoch that is not shuffled: the sample at a position is the one with that number."""

    def sample_ids(self) -> list[int]:
        """The ids of this rank's samples."""
        return list(range(self.local_start, self.local_stop))


def shard_range(start: int, stop: int, size: int, index: int) -> tuple[int, int]:
    """The part of [start, stop) that `index` of `size` takes; parts tile the range and differ by at most one."""
    length = stop - start
    return start + length * index // size, start + length * (index + 1) // size


def num_batches(num_samples: int, batch_size: int, *, drop_last: bool = False) -> int:
    """How many global batches an epoch has; the last one may be smaller, unless it is dropped."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def _keys(seed: int, epoch: int) -> np.ndarray:
    # A hash of both, not their sum: else epoch e + 1 of seed s would repeat epoch e of seed s + 1.
    digest = hashlib.blake2b(f"fourfold order {ORDER_VERSION} {seed} {epoch}".encode(), digest_size=8 * FEISTEL_ROUNDS)
    return np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)


def _permute(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    """One pass of the Feistel network over 2 · half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The 64-bit finalizer of MurmurHash3."""
    for factor in _MIX:
        x = (x ^ (x >> _SHIFT)) * factor
    return x ^ (x >> _SHIFT)
