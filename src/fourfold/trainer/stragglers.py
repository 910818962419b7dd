"""Stragglers: a rank that the others wait for is reported once, with what it spends its time on. It keeps running.

Law: ranks exchange their busy times once in WINDOW_STEPS steps; no other step communicates for this.
"""

import dataclasses
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from fourfold.plan.stragglers import find_steady_stragglers, median_step_seconds
from fourfold.step.train_step import TrainStep

SEGMENT_STEPS, NUM_SEGMENTS = 20, 3
WINDOW_STEPS = SEGMENT_STEPS * NUM_SEGMENTS
DATA = "data"


class StragglerLog(Protocol):
    """Where stragglers are reported; on ranks other than 0 it does nothing."""

    def write_record(self, record: Mapping[str, Any]) -> None: ...
    def log_message(self, text: str) -> None: ...


class StragglerDetector:
    """What this rank's last steps were spent on."""

    def __init__(self, step: TrainStep, log: StragglerLog) -> None:
        self._step, self._log = step, log
        self._steps: list[dict[str, float]] = []
        self._reported_ranks: set[int] = set()

    def step_done(self, step_number: int, data_seconds: float | None) -> None:
        """Step `step_number` of the run has ended, after a wait of `data_seconds`. Collective once in WINDOW_STEPS."""
        if self._step.plan.mesh.size == 1:
            return
        self._steps.append({DATA: data_seconds or 0.0, **self._step.busy_seconds})
        if len(self._steps) < WINDOW_STEPS:
            return
        starts = range(0, WINDOW_STEPS, SEGMENT_STEPS)
        typical = [median_step_seconds(self._steps[start : start + SEGMENT_STEPS]) for start in starts]
        self._steps = []
        hosts, rows = zip(*self._step.all_gather_json([socket.gethostname(), typical]), strict=True)
        for straggler in find_steady_stragglers(list(zip(*rows, strict=True)), self._step.plan.mesh):
            if straggler.rank not in self._reported_ranks:
                self._reported_ranks.add(straggler.rank)
                host = hosts[straggler.rank]
                steps = f"steps {step_number - WINDOW_STEPS + 1} to {step_number}"
                self._log.log_message(f"{straggler.describe(host)} ({steps})")
                self._log.write_record({"late": {**dataclasses.asdict(straggler), "host": host, "step": step_number}})
