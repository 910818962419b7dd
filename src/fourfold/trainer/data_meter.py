"""Data meter: how long training waits for its batches, and how well the accelerators are used meanwhile.

segment  whole epochs of at least MIN_STEPS steps, or MAX_STEPS steps: one line of the log
Law: ranks exchange their waits once in a segment; no step communicates for this.
"""

import socket
from collections.abc import Mapping
from typing import Any, Protocol

from fourfold.feed.feed import Feed
from fourfold.plan.utilization import TrainedStep, Window, longest_waiting, sum_known, training_window
from fourfold.step.metrics import Metrics
from fourfold.step.train_step import TrainStep

MIN_STEPS, MAX_STEPS = 20, 500
LOW_UTILIZATION = 0.9  # what MLPerf Storage requires of most workloads
MIN_LOST_SECONDS = 1.0  # less in a segment is not worth a line: steps of a millisecond wait for anything
MICROSECONDS = 1e6
DATA_KEY = "data"


class DataLog(Protocol):
    """Where segments are reported; on ranks other than 0 it does nothing."""

    def write_record(self, record: Mapping[str, Any]) -> None: ...
    def log_message(self, text: str) -> None: ...


class DataMeter:
    """The waits of this rank's steps since the last segment."""

    def __init__(self, step: TrainStep, feed: Feed, log: DataLog) -> None:
        self._step, self._feed, self._log = step, feed, log
        self._steps: list[TrainedStep] = []
        self._is_epoch_start, self._has_warned = True, False
        self._epochs = [feed.state.epoch] * 2

    def batch_read(self, batch: Any) -> None:
        """This rank has its next batch from the feed."""
        self._bytes_read = getattr(batch, "bytes_read", None)
        state = self._feed.state
        self._is_epoch_end = state.position == 0
        self._epochs[1] = state.epoch - self._is_epoch_end

    def step_done(self, step_number: int, metrics: Metrics) -> None:
        """A step has ended. Collective where a segment ends with it."""
        # No window holds the first step of an epoch.
        if not self._is_epoch_start and metrics.data_seconds is not None:
            times = metrics.data_seconds, metrics.seconds
            self._steps.append(TrainedStep(step_number, *times, metrics.samples, self._bytes_read))
        self._is_epoch_start = self._is_epoch_end
        if len(self._steps) >= (MIN_STEPS if self._is_epoch_end else MAX_STEPS):
            self.end_segment()

    def end_segment(self) -> None:
        """Write the line of the segment that ends here. Collective."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        waits = [round(step.data_seconds * MICROSECONDS) for step in steps]
        by_rank = self._step.all_gather_json(
            [socket.gethostname(), sum_known(step.bytes_read for step in steps), waits]
        )
        seconds_by_rank = [[wait / MICROSECONDS for wait in waits] for _, _, waits in by_rank]
        window = training_window(steps, seconds_by_rank)
        window = window._replace(bytes_read=sum_known(num_bytes for _, num_bytes, _ in by_rank))
        waiting = longest_waiting(seconds_by_rank)
        record = {
            "first_epoch": self._epochs[0],
            "last_epoch": self._epochs[1],
            "first_step": steps[0].number,
            "last_step": steps[-1].number,
            **window._asdict(),
            "utilization": window.utilization,
            "rank": waiting.rank,
            "host": by_rank[waiting.rank][0],
            "rank_seconds": waiting.seconds,
        }
        self._epochs[0] = self._feed.state.epoch
        self._log.write_record({DATA_KEY: record})
        self._warn(record, window)

    def _warn(self, record: Mapping[str, Any], window: Window) -> None:
        lost_seconds = window.running_seconds - window.compute_seconds
        is_low = window.utilization is not None and window.utilization < LOW_UTILIZATION
        if self._has_warned or not is_low or lost_seconds < MIN_LOST_SECONDS:
            return
        self._has_warned = True
        where = f"rank {record['rank']} on {record['host']}"
        waited = f"waited {record['rank_seconds']:.1f} s of {window.running_seconds:.1f} s for data"
        self._log.log_message(
            f"accelerator utilization {100 * (window.utilization or 0.0):.0f} %: {where} {waited} "
            f"(steps {record['first_step']} to {record['last_step']})"
        )
