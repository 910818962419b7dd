"""Timing: medians of what all ranks do at the same time, and what all of them take for it.

turn      one run of what is measured, on all ranks at once; at least seven count
steady    turns of which the faster half differs little from the median: no more are needed
deadline  from when on seven turns are enough, steady or not
mean      over the ranks, of what they do together
slowest   the rank that takes longest over all segments: a step ends with it
Law: every rank takes the same number of turns, and computes the same of what all have found, in the form of one rank's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from fourfold.comm.communicator import Communicator

# ---- on each rank ----------------------------------------------------------------------------------------------------


NUM_TURNS = 7
NUM_UNTIMED = 2
MAX_TURNS = 3 * NUM_TURNS
BURST_ELEMENTS = 2**16
STEADY = 0.05  # between the lower quartile and the median
Points = list[tuple[float, float]]
"""(size, seconds), of this rank."""


def is_steady(seconds: Sequence[float]) -> bool:
    """Whether the median of these turns would change little with more of them."""
    quartile = quantiles(seconds, n=4)[0]
    return median(seconds) - quartile <= STEADY * median(seconds)


def now() -> float:
    """Seconds of a clock, once a GPU in use has done all that it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Turns:
    """How many turns are taken. `deadline`: by `time.monotonic`."""

    def __init__(self, ranks: Communicator, deadline: float) -> None:
        self.ranks, self._deadline = ranks, deadline

    def begin(self) -> None:
        """All ranks begin to measure together. Collective.

        A link of limited rate lets a first burst pass faster; in a step, messages come one behind the other.
        """
        if self.ranks.num_hosts > 1:
            self.ranks.all_reduce(torch.zeros(BURST_ELEMENTS, device=self.ranks.device))
        self.ranks.barrier()

    def is_over(self) -> bool:
        """Whether the deadline has passed on a rank. Collective."""
        return any(self.ranks.all_gather_json(time.monotonic() > self._deadline))

    def take(self, turn: Callable[[], float]) -> int:
        """Take turns until those of all ranks are steady; returns how many count: the last ones. Collective.

        `turn` returns the seconds by which that is judged.
        """
        for _ in range(NUM_UNTIMED):
            turn()
        seconds: list[float] = []
        while True:
            seconds += [turn() for _ in range(NUM_TURNS)]
            if len(seconds) >= MAX_TURNS or self._are_enough(seconds):
                return len(seconds)

    def _are_enough(self, seconds: Sequence[float]) -> bool:
        found = self.ranks.all_gather_json([is_steady(seconds), time.monotonic() > self._deadline])
        return all(steady for steady, _ in found) or any(late for _, late in found)

    def median_seconds(self, run: Callable[[], object]) -> float:
        """The median seconds of a call, on this rank. Collective."""
        taken: list[float] = []

        def turn() -> float:
            self.begin()
            start = now()
            run()
            taken.append(now() - start)
            return taken[-1]

        return median(taken[-self.take(turn) :])


# ---- of all ranks ----------------------------------------------------------------------------------------------------


def mean_over_ranks(value: Any, ranks: Communicator) -> Any:
    """The mean of a number, or of the numbers in lists and dicts of them. Collective."""
    return _mean(ranks.all_gather_json(value))


def of_slowest_rank(rows: list[list[float]], ranks: Communicator) -> list[list[float]]:
    """The rows of the rank whose numbers add up to most. Collective."""
    return max(ranks.all_gather_json(rows), key=lambda each: sum(map(sum, each)))


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([each[key] for each in values]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(values) / len(values)
