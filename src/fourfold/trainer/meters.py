"""Meters: how long a run waits for its batches, and which rank the others wait for.

segment    of waits for data: whole epochs of at least MIN_STEPS steps, or MAX_STEPS steps: one line of the log
busy       seconds of a step that a rank spends on its own work, by phase; neither waiting for other ranks is part of
           it, nor the time in which others had the processors
straggler  a rank that is busy for more than STRAGGLER_FACTOR times the median of the others, and for at least
           MIN_EXCESS_SECONDS longer, in each of the segments of WINDOW_STEPS steps that are judged together
others     the ranks that do the same work on other samples and tokens: those that differ on dp and cp only
Law: ranks exchange their waits once in a segment, their busy times once in WINDOW_STEPS steps; no other step
communicates for this. A straggler is reported once, with what it spends its time on. It keeps running.
Law: a rank is judged by its typical step, so neither a slow step nor a processor that others use makes a straggler.
"""

import dataclasses
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import Any

from fourfold.feed.feed import Feed
from fourfold.step.step_runner import Metrics
from fourfold.step.train_step import TrainStep
from fourfold.trace.utilization import TrainedStep, Window, longest_waiting, sum_known, training_window
from fourfold.trainer.run_logger import RunLogger
from fourfold.words.mesh import Mesh

# ---- stragglers -----------------------------------------------------------------------------------------------------


STRAGGLER_FACTOR = 1.5
MIN_EXCESS_SECONDS = 0.002  # smaller differences are noise of the system


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait.

    seconds        per step that it is busy; `others_seconds`: that the others are
    place          the phase of the step in which it loses most; `place_seconds`, `others_place_seconds`: spent there
    The field names are keys of the log on disk.
    """

    rank: int
    seconds: float
    others_seconds: float
    place: str
    place_seconds: float
    others_place_seconds: float

    def describe(self, host: str) -> str:
        """The warning for a user; `host` is the host of the rank."""
        there = f"{self.place} takes {_ms(self.place_seconds)}, on the others {_ms(self.others_place_seconds)}"
        busy = f"busy for {_ms(self.seconds)} a step, the others for {_ms(self.others_seconds)}"
        return f"rank {self.rank} on {host} is a straggler: {busy}; {there}"


def median_step_seconds(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Busy seconds of one rank's typical step: by phase, the median over the steps."""
    rows = list(steps)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row.get(name, 0.0) for row in rows) for name in names}


def find_steady_stragglers(segments: Sequence[Sequence[Mapping[str, float]]], mesh: Mesh) -> list[Straggler]:
    """The stragglers of all segments, in rank order, as they are in the last one. `segments`: see `find_stragglers`."""
    *earlier, last = [find_stragglers(busy, mesh) for busy in segments]
    ranks = [{each.rank for each in found} for found in earlier]
    return [each for each in last if all(each.rank in found for found in ranks)]


def find_stragglers(busy: Sequence[Mapping[str, float]], mesh: Mesh) -> list[Straggler]:
    """The stragglers, in rank order. `busy`: by rank, the typical step as `median_step_seconds` gives it."""
    stragglers = []
    for rank, row in enumerate(busy):
        total = sum(row.values())
        others = [busy[other] for other in mesh.peers(rank, "dp", "cp") if other != rank]
        if not others:
            continue
        # The higher of two middle values: at most half of the ranks can be stragglers.
        usual = median_high(sum(other.values()) for other in others)
        if total <= STRAGGLER_FACTOR * usual or total - usual < MIN_EXCESS_SECONDS:
            continue
        others_row = {name: median(other.get(name, 0.0) for other in others) for name in row}
        phase = max(row, key=lambda name: row[name] - others_row[name])
        stragglers.append(Straggler(rank, total, usual, phase, row[phase], others_row[phase]))
    return stragglers


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


# ---- waits for data --------------------------------------------------------------------------------------------------


MIN_STEPS, MAX_STEPS = 20, 500
LOW_UTILIZATION = 0.9  # what MLPerf Storage requires of most workloads
MIN_LOST_SECONDS = 1.0  # less in a segment is not worth a line: steps of a millisecond wait for anything
MICROSECONDS = 1e6
DATA_KEY = "data"


class DataMeter:
    """The waits of this rank's steps since the last segment."""

    def __init__(self, step: TrainStep, feed: Feed, log: RunLogger) -> None:
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


# ---- waits for a rank ------------------------------------------------------------------------------------------------


SEGMENT_STEPS, NUM_SEGMENTS = 20, 3
WINDOW_STEPS = SEGMENT_STEPS * NUM_SEGMENTS
DATA = "data"


class StragglerDetector:
    """What this rank's last steps were spent on."""

    def __init__(self, step: TrainStep, log: RunLogger) -> None:
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
