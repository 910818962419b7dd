"""Lateness: in a run, a rank that the others wait for is named once, with what it is in. It is not ended.

Law: every rank tells how long it was busy once in WINDOW steps, and in no other step does anybody communicate for it.
"""

import contextlib
import dataclasses
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fourfold.plan.stragglers import find_stragglers, median_step_seconds
from fourfold.step.build import TrainStep

WINDOW_STEPS = 20
DATA = "data"


class StragglerLog(Protocol):
    """Where late ranks are named; only rank 0's says anything."""

    def write_record(self, record: Mapping[str, Any]) -> None: ...
    def log_message(self, text: str) -> None: ...


class StragglerDetector:
    """What the last steps of this rank were spent on."""

    def __init__(self, step: TrainStep, log: StragglerLog) -> None:
        self._step, self._log = step, log
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS)
        self._data_seconds, self._num_steps = 0.0, 0
        self._reported_ranks: set[int] = set()

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """Within: this rank waits for its next batch."""
        begin = time.perf_counter()
        yield
        self._data_seconds = time.perf_counter() - begin

    def step_done(self, step_number: int) -> None:
        """Step `number` of the run has ended. Collective, once in WINDOW steps."""
        self._steps.append({DATA: self._data_seconds, **self._step.busy_seconds})
        self._num_steps += 1
        if self._num_steps % WINDOW_STEPS or self._step.plan.mesh.size == 1:
            return
        told = self._step.all_gather_json([socket.gethostname(), median_step_seconds(self._steps)])
        for found in find_stragglers([busy for _, busy in told]):
            if found.rank not in self._reported_ranks:
                self._reported_ranks.add(found.rank)
                host = told[found.rank][0]
                self._log.log_message(
                    f"{found.describe(host)} (steps {step_number - WINDOW_STEPS + 1} to {step_number})"
                )
                self._log.write_record({"late": {**dataclasses.asdict(found), "host": host, "step": step_number}})
