"""Ids ahead: the sample ids of a rank's batches, computed for several batches at once.

block   consecutive local batches with at least `BLOCK` samples together, or the last ones of an epoch
Law: the ids of each batch are its `sample_ids()`; no more than a block and a batch of them are kept.

An order costs some 40 numpy calls, whatever the number of positions: in batches of 64 about 1 to 4.5 µs per id, in
blocks of `BLOCK` less than 0.1 µs.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from fourfold.orders.sample_order import BatchRange, GlobalOrder

BLOCK = 8192  # the chunk that `keyed_permutation` works on; the first batch waits for one block, less than 1 ms


def with_ids(batches: Iterable[BatchRange], *, block: int = BLOCK) -> Iterator[tuple[BatchRange, list[int]]]:
    """Batches of one epoch in one order, of which no sample is left out, each with the ids of this rank's samples."""
    waiting: list[BatchRange] = []
    num_samples = 0
    for batch in batches:
        waiting.append(batch)
        num_samples += batch.local_stop - batch.local_start
        if num_samples >= block:
            yield from _compute(waiting)
            waiting, num_samples = [], 0
    if waiting:
        yield from _compute(waiting)


def _compute(batches: list[BatchRange]) -> Iterator[tuple[BatchRange, list[int]]]:
    first = batches[0]
    order = GlobalOrder(first.num_samples) if first.order is None else first.order
    ranges = [np.arange(batch.local_start, batch.local_stop, dtype=np.int64) for batch in batches]
    ids = order.ids_at(first.seed, first.epoch, np.concatenate(ranges))
    start = 0
    for batch, positions in zip(batches, ranges, strict=True):
        yield batch, ids[start : start + len(positions)].tolist()
        start += len(positions)
