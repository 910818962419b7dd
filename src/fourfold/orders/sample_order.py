"""Sample order: which sample each rank trains on at each step, as a pure function of (seed, epoch, position).

position  an index into the epoch's order, 0 to num_samples − 1
id        the sample at a position
shard     the consecutive part of a range of positions that one index of an axis takes
order     which id is at which position: global (a keyed bijection over all samples: Feistel network with
          cycle-walking), in order (the id is the position), `windowed_order`, `mixed_order`
Law: every epoch visits each sample once; neither the number of ranks nor the batch size changes the order.

Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), §3 cycle-walking, §4 Feistel.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

ORDER_VERSION = 1
UNSHUFFLED = 0  # stands for the version of the order where samples come as the source has them
FEISTEL_ROUNDS = 8
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


def rows(num_samples: int, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    """Sample ids at positions [start, stop) of an epoch: int64 [stop − start], without O(num_samples) memory."""
    return order_rows(GlobalOrder(num_samples), seed, epoch, start, stop)


class SampleOrder(Protocol):
    """The order of a source's samples.

    kind         its name, such as "global"
    version      changes whenever the ids do: a checkpoint names samples by position
    num_positions  the positions of an epoch
    """

    @property
    def kind(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def num_positions(self) -> int: ...

    def ids_at(self, seed: int, epoch: int, positions: np.ndarray, /) -> np.ndarray:
        """The ids at some positions of an epoch: int64 [positions], without O(num_positions) memory."""
        ...

    def description(self) -> str:
        """The kind and what it depends on, for people."""
        ...

    def digest(self) -> str:
        """A hash of everything but seed and epoch that the ids depend on."""
        ...


def order_rows(order: SampleOrder, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    """Sample ids at positions [start, stop) of an epoch: int64 [stop − start]."""
    if not 0 <= start <= stop <= order.num_positions:
        raise IndexError(f"positions {start} to {stop} are outside an epoch of {order.num_positions} samples")
    return order.ids_at(seed, epoch, np.arange(start, stop, dtype=np.int64))


def digest_of(*values: object) -> str:
    """A hash of some values, as their texts; of arrays, as their bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else f"{value} ".encode())
    return digest.hexdigest()


class GlobalOrder(NamedTuple):
    """A keyed bijection over all samples."""

    num_positions: int
    kind, version = "global", ORDER_VERSION

    def ids_at(self, seed: int, epoch: int, positions: np.ndarray, /) -> np.ndarray:
        return _global_ids(self.num_positions, seed, epoch, positions)

    def description(self) -> str:
        return "global"

    def digest(self) -> str:
        return digest_of(self.kind, self.version, self.num_positions)


class InOrder(NamedTuple):
    """The sample at a position is the one with that number, in every epoch."""

    num_positions: int
    kind, version = "in order", UNSHUFFLED

    def ids_at(self, seed: int, epoch: int, positions: np.ndarray, /) -> np.ndarray:
        return positions

    def description(self) -> str:
        return "in the source's order"

    def digest(self) -> str:
        return digest_of(self.kind, self.version, self.num_positions)


def _global_ids(num_samples: int, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    keys = _keys(seed, epoch)
    ids = _permute(positions.astype(np.uint64), half, keys)
    outside = np.flatnonzero(ids >= num_samples)
    while outside.size:
        ids[outside] = _permute(ids[outside], half, keys)
        outside = outside[ids[outside] >= num_samples]
    return ids.astype(np.int64)


class BatchRange(NamedTuple):
    """A global batch: positions [start, stop) of an epoch's order. A rank takes [local_start, local_stop) of them.

    order     None: the global one
    left_out  which of this rank's samples are damaged, and not in the batch: indices from local_start on
    """

    num_samples: int
    seed: int
    epoch: int
    start: int
    stop: int
    local_start: int
    local_stop: int
    order: SampleOrder | None = None
    left_out: Sequence[int] = ()

    def __str__(self) -> str:
        return f"positions {self.start} to {self.stop} of epoch {self.epoch}, seed {self.seed}"

    def sample_ids(self) -> list[int]:
        """The ids of this rank's samples, without those that are left out."""
        order = GlobalOrder(self.num_samples) if self.order is None else self.order
        ids = order_rows(order, self.seed, self.epoch, self.local_start, self.local_stop).tolist()
        left_out = set(self.left_out)
        return [number for index, number in enumerate(ids) if index not in left_out] if left_out else ids


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
