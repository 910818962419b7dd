"""Emulator: one emulated accelerator that takes its batches from a feed, computes for a set time, and meets the others.

compute  the accelerator sleeps until its computing time is over; its batch is in host memory, not copied to a device
barrier  after each step, as DLIO has it: all accelerators wait for the last, so a late batch is charged to all
Law: a step is asked for when the one before has ended, so that waits, computing and barriers tile the running time.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from fourfold.feed.batches import Batch
from fourfold.feed.bench.workload import Seconds
from fourfold.feed.feed import Feed
from fourfold.feed.position import Position
from fourfold.plan.utilization import TimedStep

Barrier = Callable[[], object]


class Clock(Protocol):
    """What time it is, in seconds."""

    def now(self) -> float: ...

    def sleep_until(self, deadline: float) -> None: ...


class SystemClock:
    """The clock of this host, the same in all of its processes."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, deadline: float) -> None:
        time.sleep(max(0.0, deadline - time.monotonic()))


class Accelerator(NamedTuple):
    """An emulated accelerator: one of `size` that train together.

    feed     yields its part of each global batch
    compute  how long it computes in a step; drawn by `rng`
    steps    of an epoch, at most; None: all
    """

    feed: Feed
    compute: Seconds
    rng: np.random.Generator
    barrier: Barrier
    clock: Clock = SystemClock()
    steps: int | None = None

    def epoch(self, number: int) -> list[TimedStep]:
        """Do an epoch, the first is 0. The barrier is called once before it and after each step."""
        seed = self.feed.state.seed
        self.feed.load_state(Position(seed, number, 0, self.feed.num_samples))
        self.barrier()
        batches = iter(self.feed)
        try:
            return list(self._steps(batches))
        finally:
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator: its thread ends here

    def _steps(self, batches: Iterator[Batch]) -> Iterator[TimedStep]:
        done, asked = 0, self.clock.now()
        while done != self.steps and (batch := next(batches, None)) is not None:
            ready = self.clock.now()
            seconds = self.compute.draw(self.rng)
            self.clock.sleep_until(ready + seconds)
            self.barrier()
            ended = self.clock.now()
            yield TimedStep(asked, ready, ended, seconds, len(batch[1]), batch.bytes_read)
            done, asked = done + 1, ended
