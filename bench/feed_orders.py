"""Orders of a feed: the cost of a sample id, and of a resume in the middle of an epoch.

    PYTHONPATH=src:. python -m bench.feed orders [--rounds 7]

Each order has 10⁹ positions: global; windowed over 10,000 shards, of one size and of any; mixed of two sources. By
round, one after the other:
    block       ids of 65,536 positions in the middle of the epoch, computed at once
    batches     the same ids as a feed takes them: in batches of 64, computed ahead
    one by one  the same in batches of 64, each computed by itself
    resume      a new `ff.Feed`, `load_state_dict` of the middle of the epoch, and its first batch of 64
    peer        `numpy.random.Generator.permutation` of 10⁷ numbers: 80 MB for each epoch
A source makes its numbers from nothing, so that only the order is measured.
"""

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from bench.measurement import describe_machine, format_table
from fourfold.feed.feed import Feed, with_ids
from fourfold.feed.mixed import Mixed, Weighted
from fourfold.feed.position import Position
from fourfold.orders.sample_order import BatchRange, SampleOrder, order_rows

NUM_SAMPLES, NUM_SHARDS = 10**9, 10**4
NUM_IDS, BATCH, NUM_PERMUTED = 65_536, 64, 10**7


class Numbers:
    """Samples that are their numbers."""

    def __init__(self, shard_sizes: np.ndarray) -> None:
        self.shard_sizes, self._length = shard_sizes, int(shard_sizes.sum())

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.tensor(indices)
        return numbers, numbers


def feeds() -> dict[str, Callable[[], Feed]]:
    """A new feed of each order."""
    even = np.full(NUM_SHARDS, NUM_SAMPLES // NUM_SHARDS)
    uneven = even + np.random.default_rng(0).permutation(np.repeat([-1, 1], NUM_SHARDS // 2)) * 40_000
    windowed = {"batch_size": BATCH, "order": "windowed", "window": 8}

    def mixed() -> Feed:
        parts = {"a": Weighted(Numbers(even), 0.7), "b": Weighted(Numbers(uneven), 0.3, repeat=None)}
        return Feed(Mixed(parts), batch_size=BATCH)

    return {
        "global": lambda: Feed(Numbers(even), batch_size=BATCH),
        "windowed": lambda: Feed(Numbers(even), **windowed),
        "windowed, uneven shards": lambda: Feed(Numbers(uneven), **windowed),
        "mixed": mixed,
    }


def batches_of(order: SampleOrder, start: int) -> Iterator[BatchRange]:
    for first in range(start, start + NUM_IDS, BATCH):
        yield BatchRange(order.num_positions, 0, 3, first, first + BATCH, first, first + BATCH, order)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def resume(make: Callable[[], Feed], state: str) -> None:
    feed = make()
    feed.load_state_dict(json.loads(state))
    next(iter(feed))


def measure(make: Callable[[], Feed], rounds: int) -> list[str]:
    """The row of an order: medians of the rounds."""
    feed = make()
    order: Any = feed.sample_order
    middle = order.num_positions // 2
    feed.load_state(Position(0, 3, middle, order.num_positions))
    state = json.dumps(feed.state_dict())
    kinds: list[Callable[[], object]] = [
        lambda: order_rows(order, 0, 3, middle, middle + NUM_IDS),
        lambda: [ids for _, ids in with_ids(batches_of(order, middle))],
        lambda: [batch.sample_ids() for batch in batches_of(order, middle)],
        lambda: resume(make, state),
    ]
    found = np.median([[seconds(kind) for kind in kinds] for _ in range(rounds)], axis=0)
    tracemalloc.start()
    resume(make, state)
    kinds[1]()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    costs = [f"{each / NUM_IDS * 1e9:.0f}" for each in found[:3]]
    return [*costs, f"{found[3] * 1e3:.1f}", str(len(state)), f"{peak / 1e6:.1f}"]


def run_orders(rounds: int) -> None:
    """Measure all orders, and print the table."""
    torch.set_num_threads(1)
    print(describe_machine())
    names = ["", "block, ns per id", "batches", "one by one", "resume, ms", "state, B", "memory, MB"]
    rows = [names, *([name, *measure(make, rounds)] for name, make in feeds().items())]
    permute = np.random.default_rng(0).permutation
    cost = statistics.median(seconds(lambda: permute(NUM_PERMUTED)) for _ in range(rounds)) / NUM_PERMUTED
    rows.append(["numpy permutation of 10⁷", f"{cost * 1e9:.0f}", "–", "–", "–", "–", f"{NUM_PERMUTED * 8 / 1e6:.0f}"])
    print(format_table(rows))
