"""Throughput: how fast a run goes, over its last steps and as a whole.

Law: the time between the ends of two steps counts as a whole, with reading data, evaluations and checkpoints.
"""

import time
from collections import deque

from fourfold.step.metrics import Metrics
from fourfold.words.measures import waiting_fraction
from fourfold.words.progress import ProgressLine

AVERAGED_STEPS = 20  # steps over which the progress line averages


class Throughput:
    """The clock of a run on one rank."""

    def __init__(self) -> None:
        self.num_units = 0.0
        """Samples or tokens of all steps since `restart`."""
        self._recent_metrics: deque[tuple[float, Metrics]] = deque(maxlen=AVERAGED_STEPS)
        self.restart(0)

    def restart(self, step: int) -> None:
        """The run begins now, after `step`."""
        self.first_step = step
        self._start_time = time.perf_counter()
        # The end of each recent step, and of the step before them: the time in between includes reading data.
        self._step_end_times = deque([self._start_time], maxlen=AVERAGED_STEPS + 1)

    def add_step(self, units: float, metrics: Metrics) -> None:
        """A step of so many samples or tokens has ended just now."""
        self.num_units += units
        self._recent_metrics.append((units, metrics))
        self._step_end_times.append(time.perf_counter())

    @property
    def units_per_second(self) -> float:
        """Over all ranks, the mean of the last steps."""
        return sum(units for units, _ in self._recent_metrics) / self._recent_seconds

    @property
    def _recent_seconds(self) -> float:
        return max(self._step_end_times[-1] - self._step_end_times[0], 1e-9)

    def progress_line(self, step: int, *, num_steps: int, unit: str) -> ProgressLine:
        """Where the run stands after `step`."""
        elapsed = self._step_end_times[-1] - self._start_time
        losses = [m.loss for _, m in self._recent_metrics if m.skipped is None]
        return ProgressLine(
            step=step,
            num_steps=num_steps,
            loss=sum(losses) / len(losses) if losses else float("nan"),
            units_per_second=self.units_per_second,
            unit=unit,
            waiting_fraction=waiting_fraction([(m.waiting_seconds, m.seconds) for _, m in self._recent_metrics]),
            remaining_seconds=elapsed / (step - self.first_step) * (num_steps - step),
        )
