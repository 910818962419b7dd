"""Accelerator utilization: the part of its running time in which an accelerator computes.

step     an accelerator asks for a batch, has it, computes, and meets the others
window   the steps that are measured: those of an epoch after its first, from the end of that one to the end of the last
Law: utilization = compute time / running time of a window, and every rate is of the same window. The ranks of a step
wait for the one whose batch comes last, so its wait is charged to all.

Source: DLIO (Devarajan et al., CCGrid 2021) and the rules of MLPerf Storage, "accelerator utilization".
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

EXCLUDED_STEPS = 1  # the first of an epoch: its batch is read while nothing runs


class Window(NamedTuple):
    """Sums over the steps that are measured. `bytes_read`: None where the source does not count them."""

    num_steps: int
    num_samples: int
    compute_seconds: float
    running_seconds: float
    bytes_read: int | None = None

    @property
    def utilization(self) -> float | None:
        """0 to 1; None for a window without time."""
        return self.compute_seconds / self.running_seconds if self.running_seconds > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        return self.num_samples / self.running_seconds if self.running_seconds > 0 else None

    @property
    def bytes_per_second(self) -> float | None:
        if self.bytes_read is None or not self.running_seconds > 0:
            return None
        return self.bytes_read / self.running_seconds


NO_STEPS = Window(0, 0, 0.0, 0.0, 0)


def add_windows(windows: Iterable[Window]) -> Window:
    """The windows as one: its utilization is their mean, weighted by their running time."""
    windows = list(windows)
    steps, samples, computing, running = 0, 0, 0.0, 0.0
    for window in windows:
        steps, samples = steps + window.num_steps, samples + window.num_samples
        computing, running = computing + window.compute_seconds, running + window.running_seconds
    return Window(steps, samples, computing, running, sum_known(window.bytes_read for window in windows))


def sum_known(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


class TimedStep(NamedTuple):
    """One step of one accelerator, in seconds of one clock.

    asked            when it asked for its batch; `ready`: when it had it
    ended            when it had computed, and all accelerators with it
    compute_seconds  how long it computes
    bytes_read       what was read for its batch; None where the source does not count
    """

    asked: float
    ready: float
    ended: float
    compute_seconds: float
    num_samples: int
    bytes_read: int | None = None

    @property
    def data_seconds(self) -> float:
        return self.ready - self.asked


def epoch_window(steps: Sequence[TimedStep]) -> Window:
    """The window of an accelerator's steps of one epoch."""
    if len(steps) <= EXCLUDED_STEPS:
        return NO_STEPS
    before, counted = steps[EXCLUDED_STEPS - 1], steps[EXCLUDED_STEPS:]
    return Window(
        len(counted),
        sum(step.num_samples for step in counted),
        sum(step.compute_seconds for step in counted),
        counted[-1].ended - before.ended,
        sum_known(step.bytes_read for step in counted),
    )


def all_ranks(windows: Sequence[Window]) -> Window:
    """The windows of accelerators that ran at the same time as one, of their mean length."""
    total = add_windows(windows)
    size = max(1, len(windows))
    return total._replace(
        num_steps=total.num_steps // size,
        compute_seconds=total.compute_seconds / size,
        running_seconds=total.running_seconds / size,
    )


class TrainedStep(NamedTuple):
    """One step of training, on one rank: how long it waited for its batch, and how long the step then took.

    num_samples  of the global batch; bytes_read: for this rank's part of it
    """

    number: int
    data_seconds: float
    step_seconds: float
    num_samples: int
    bytes_read: int | None = None


class Waiting(NamedTuple):
    """Which rank waited most for its batches, and how long."""

    rank: int
    seconds: float


def training_window(steps: Sequence[TrainedStep], waits_by_rank: Sequence[Sequence[float]]) -> Window:
    """The window of this rank's steps. `waits_by_rank`: of each rank, how long it waited before each of the steps.

    The time of a step is this rank's wait and what followed; the longest wait of any rank is not computing.
    """
    lengths = [step.data_seconds + step.step_seconds for step in steps]
    longest = [max(waits) for waits in zip(*waits_by_rank, strict=True)]
    running = sum(lengths)
    charged = sum(min(wait, length) for wait, length in zip(longest, lengths, strict=True))
    num_bytes = sum_known(step.bytes_read for step in steps)
    return Window(len(steps), sum(step.num_samples for step in steps), running - charged, running, num_bytes)


def longest_waiting(waits_by_rank: Sequence[Sequence[float]]) -> Waiting:
    """The rank that the others waited for: the time by which it was the last, or equal, counts."""
    late = [0.0] * len(waits_by_rank)
    for waits in zip(*waits_by_rank, strict=True):
        longest = max(waits)
        late[waits.index(longest)] += longest
    rank = max(range(len(late)), key=late.__getitem__)
    return Waiting(rank, sum(waits_by_rank[rank]))
