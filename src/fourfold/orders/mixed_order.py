"""Mixed order: several sources by weight, a fixed quota of each in every block of positions.

part     one source: its own order, its weight, and how often an epoch may go through it (`repeat`)
block    so many consecutive positions; the last one of an epoch may be smaller
quota    how many positions of a block are of a part: in proportion to the weights
slot     a place in a block before it is shuffled; the parts' slots are spread evenly over the block
pass     once through all samples of a part, in its own order; passes go on from one epoch to the next
id       of a sample: those of all parts one after the other. In an epoch's second pass through a part the ids are
         larger by the number of all samples, in its third pass by twice as much
Law: a block holds its quotas, and no sample of a part comes a second time before all samples of the part have come
once, except that a block in which a pass ends and the next begins shuffles the two.

An epoch ends where the first of the parts that have a `repeat` has been gone through so often.

Quotas: the smallest block size up to MAX_AUTO_BLOCK at which all of them are exact, or its largest multiple up to
SMALL_BLOCK; else the block size at which the largest relative error of a part's share is least, which `max_error` says.
Of a given block size: largest remainders, so that each quota is within one of the exact one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fourfold.orders.keyed_permutation import derive_keys, permute
from fourfold.orders.sample_order import SampleOrder, digest_of
from fourfold.words.errors import Problem

MIXED_VERSION = 1
SMALL_BLOCK, MAX_AUTO_BLOCK, MAX_BLOCK = 64, 4096, 65_536
EXACT = 1e-9  # a quota is exact if it is within so much of a whole number, relative to itself


class MixedPart(NamedTuple):
    """One source of a mixture. `num_ids`: how many samples it has; `repeat`: passes per epoch; None: any number."""

    name: str
    order: SampleOrder
    num_ids: int
    weight: float
    repeat: float | None = 1

    @property
    def limit(self) -> int | None:
        """How many of its samples an epoch may take."""
        return None if self.repeat is None else math.floor(self.repeat * self.order.num_positions)


def mixture_problems(parts: Sequence[MixedPart], block_size: int | None) -> list[Problem]:
    """Why there is no mixed order of these parts, whose weights are above 0."""
    if all(part.repeat is None for part in parts):
        need = "one with a repeat, which ends the epoch"
        return [Problem("sources with repeat = None only", need, f"repeat=1 for {parts[0].name!r}")]
    problems = []
    for part in parts:
        if part.limit == 0:
            got = f"repeat = {part.repeat} of {part.order.num_positions} samples of {part.name!r}"
            problems.append(Problem(got, "at least one sample in an epoch", "repeat=1"))
    weights = [part.weight for part in parts]
    quotas = choose_quotas(weights, block_size)
    for part, quota in zip(parts, quotas, strict=True):
        if not quota:
            share, largest = part.weight / sum(weights), block_size or MAX_AUTO_BLOCK
            got = f"weight {part.weight:g} of {part.name!r}, a share of {share:.2g}"
            need = f"at least one sample in a block of {largest}"
            enough = math.ceil(1 / share)
            attempt = f"block_size={enough}" if enough <= MAX_BLOCK else "a larger weight"
            problems.append(Problem(got, need, attempt))
    return problems


def choose_quotas(weights: Sequence[float], block_size: int | None = None) -> np.ndarray:
    """The parts' quotas: int64 [parts]. Their sum is the block size. See the module for the rule."""
    sizes = np.array([block_size]) if block_size else np.arange(len(weights), MAX_AUTO_BLOCK + 1)
    if not len(sizes):  # more parts than the largest block has positions
        return np.zeros(len(weights), dtype=np.int64)
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum()
    exact = sizes[:, None] * shares
    nearest = np.rint(exact)
    is_exact = (np.abs(exact - nearest) <= EXACT * exact).all(axis=1)
    if is_exact.any():
        smallest = nearest[int(np.argmax(is_exact))].astype(np.int64)
        return smallest * (1 if block_size else max(1, SMALL_BLOCK // int(smallest.sum())))
    quotas = np.floor(exact)
    num_left = (sizes - quotas.sum(axis=1)).astype(np.int64)
    by_remainder = np.argsort(quotas - exact, axis=1, kind="stable")
    np.put_along_axis(
        quotas,
        by_remainder,
        np.take_along_axis(quotas, by_remainder, 1) + (np.arange(len(weights)) < num_left[:, None]),
        axis=1,
    )
    errors = np.abs(quotas / exact - 1).max(axis=1)
    return quotas[int(np.argmin(errors))].astype(np.int64)


class MixedOrder:
    """The mixed order of some parts, which `mixture_problems` has checked."""

    kind, version = "mixed", MIXED_VERSION

    def __init__(self, parts: Sequence[MixedPart], block_size: int | None = None) -> None:
        self._parts = tuple(parts)
        weights = [part.weight for part in parts]
        self.quotas = choose_quotas(weights, block_size)
        self.block_size = int(self.quotas.sum())
        self.max_error = float(np.abs(self.quotas / self.block_size * sum(weights) / np.asarray(weights) - 1).max())
        """The largest relative error of a part's share of a block."""
        self._set_slots()
        self._set_epoch()
        sizes = [part.num_ids for part in parts]
        self._num_ids, self._first_ids = sum(sizes), np.cumsum([0, *sizes])[:-1]

    def _set_slots(self) -> None:
        """The part of each slot, and how many slots before it are of the same part: int64 [block_size]."""
        parts = np.repeat(np.arange(len(self._parts)), self.quotas)
        earlier = np.concatenate([np.arange(quota) for quota in self.quotas])
        spread = np.lexsort([parts, (earlier + 0.5) / self.quotas[parts]])
        self._slot_parts, self._slots_before = parts[spread], earlier[spread]

    def _set_epoch(self) -> None:
        """The positions of an epoch, and how many of them are of each part."""
        limits = [part.limit for part in self._parts]
        self._num_blocks = min(
            limit // int(quota) for limit, quota in zip(limits, self.quotas, strict=True) if limit is not None
        )
        self._rest = self.block_size
        for index, limit in enumerate(limits):
            left = self.block_size if limit is None else limit - self._num_blocks * int(self.quotas[index])
            slots = np.flatnonzero(self._slot_parts == index)
            if left < len(slots):  # the last block ends before the slot that this part cannot fill any more
                self._rest = min(self._rest, int(slots[left]))
        in_rest = np.bincount(self._slot_parts[: self._rest], minlength=len(self._parts))
        self.num_positions = self._num_blocks * self.block_size + self._rest
        self.samples_per_epoch = self._num_blocks * self.quotas + in_rest
        """Of each part: int64 [parts]."""

    def ids_at(self, seed: int, epoch: int, positions: np.ndarray, /) -> np.ndarray:
        blocks, slots = np.divmod(positions, self.block_size)
        keys = derive_keys("fourfold mixed order", MIXED_VERSION, "blocks", seed, epoch)
        size = self.block_size
        if blocks.max(initial=0) == self._num_blocks:
            size = np.where(blocks == self._num_blocks, self._rest, self.block_size)
        slots = permute(slots, size, keys, blocks)
        parts = self._slot_parts[slots]
        taken = blocks * self.quotas[parts] + self._slots_before[slots]
        ids = np.empty(len(positions), dtype=np.int64)
        for index in np.flatnonzero(np.bincount(parts)).tolist():
            mine = np.flatnonzero(parts == index)
            ids[mine] = self._part_ids(index, seed, epoch, taken[mine])
        return ids

    def _part_ids(self, index: int, seed: int, epoch: int, taken: np.ndarray) -> np.ndarray:
        """The ids of one part's samples in an epoch, of which so many have been taken before each."""
        order, length = self._parts[index].order, self._parts[index].order.num_positions
        before = epoch * int(self.samples_per_epoch[index])
        passes, positions = np.divmod(before + taken, length)
        ids = np.empty(len(taken), dtype=np.int64)
        own_seed = int(derive_keys("fourfold mixed order", MIXED_VERSION, "part", index, seed)[0] >> np.uint64(1))
        first_pass, last_pass = int(passes.min()), int(passes.max())
        for number in range(first_pass, last_pass + 1):
            now = slice(None) if first_pass == last_pass else np.flatnonzero(passes == number)
            earlier_passes = number - before // length
            first = int(self._first_ids[index]) + earlier_passes * self._num_ids
            ids[now] = first + order.ids_at(own_seed, number, positions[now])
        return ids

    def description(self) -> str:
        shares = ", ".join(f"{part.name} {quota}" for part, quota in zip(self._parts, self.quotas, strict=True))
        return f"mixed, blocks of {self.block_size}: {shares}"

    def digest(self) -> str:
        parts = [(part.name, part.order.digest(), part.num_ids, part.limit) for part in self._parts]
        return digest_of(self.kind, self.version, self.quotas, parts)
