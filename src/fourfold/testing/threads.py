"""Ranks as threads of one process: the simulated rung. Real shared memory, no process group.

Law: what a rank does here is what it does as a process; only `exchange`, `broadcast` and `sum` are done by threads.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from fourfold.parts.comm import Ranks
from fourfold.words.world import World

TIME_LIMIT_SECONDS = 60.0


class _Meeting:
    """Where the threads of a world meet: a row of values, and a barrier before and after reading it."""

    def __init__(self, size: int) -> None:
        self.row: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIME_LIMIT_SECONDS)


class ThreadRanks(Ranks):
    """One thread's view of a world of threads."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(World(rank=rank, size=size, local_rank=rank, local_size=size), torch.device("cpu"))
        self._meeting = meeting

    def swap(self, value: Any) -> list[Any]:
        """Every thread's value itself, in rank order. Collective."""
        self._meeting.row[self.rank] = value
        self._meeting.barrier.wait()
        row = list(self._meeting.row)
        self._meeting.barrier.wait()
        return row

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self.swap(json.dumps(value))]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        if self.size > 1:
            values = self.swap(tensor)[source]
            if self.rank != source:
                tensor.copy_(values)
            self._meeting.barrier.wait()

    def sum(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            total = torch.stack(self.swap(tensor.clone())).sum(0)
            tensor.copy_(total)


def run(size: int, body: Callable[[ThreadRanks], Any]) -> list[Any]:
    """`body(ranks)` on `size` threads; their results in rank order. The first error of any thread is raised."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadRanks(rank, size, meeting))
        except BaseException as error:  # raised in the caller's thread, below
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    for thread in threads:
        # Once one has failed, the others may wait for it in vain: they end with the process.
        while thread.is_alive() and not errors and time.monotonic() < deadline:
            thread.join(0.05)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a world of {size} threads did not end within {TIME_LIMIT_SECONDS:.0f} s")
    return results
