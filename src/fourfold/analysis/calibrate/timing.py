"""Timing: medians of what all ranks do at the same time.

turn   one run of what is measured, on all ranks at once; at least seven count
Law: every rank takes the same number of turns.
"""

import time
from collections.abc import Callable
from statistics import median

from fourfold.parts.comm.communicator import Communicator

NUM_TURNS = 7
NUM_UNTIMED = 2
Points = list[tuple[float, float]]
"""(size, seconds), of this rank."""


def median_seconds(run: Callable[[], object], ranks: Communicator, *, turns: int = NUM_TURNS) -> float:
    """The median seconds of a call, on this rank. Collective."""
    seconds = []
    for _ in range(NUM_UNTIMED + turns):
        ranks.barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds[NUM_UNTIMED:])
