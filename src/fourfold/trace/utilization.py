"""Accelerator utilization: the part of its running time in which an accelerator computes.

step     an accelerator asks for a batch, has it, computes, and meets the others
window   the steps that are measured: those of an epoch after its first, from the end of that one to the end of the last
Law: utilization = compute time / running time of a window, and every rate is of the same window. The ranks of a step
wait for the one whose batch comes last, so its wait is charged to all.

Source: DLIO (Devarajan et al., CCGrid 2021) and the rules of MLPerf Storage, "accelerator utilization".

category    forward, backward, measure, update, average, data, waiting, between actions
background  categories of what runs while the process does something else: reduce, gather, unshard, send
Law: every category but those in the background is the process's own time, and they add up to the step.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fourfold.plan.rank_program import SENDS
from fourfold.trace.trace_file import COLLECTIVE_LANES, DATA_SPAN, STEP_SPAN, Interval, RankEvents, Trace, is_action
from fourfold.words.program import Verb

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


# ---- Step breakdown: what the seconds of a step were spent on, by category ------------------------------------------

COMPUTE_CATEGORIES = {
    Verb.FORWARD: "forward",
    Verb.BACKWARD: "backward",
    Verb.BACKWARD_INPUT: "backward",
    Verb.BACKWARD_WEIGHT: "backward",
    Verb.MEASURE: "measure",
    Verb.UPDATE: "update",
}
DATA_TIME, WAITING_TIME, OTHER_TIME, REDUCE_TIME = "data", "waiting", "between actions", "reduce"
AVERAGE_TIME, GATHER_TIME, UNSHARD_TIME, SEND_TIME = "average", "gather", "unshard", "send"
BACKGROUND_TIMES = (REDUCE_TIME, GATHER_TIME, UNSHARD_TIME, SEND_TIME)
CATEGORIES = {
    **COMPUTE_CATEGORIES,
    **dict.fromkeys((*SENDS, Verb.TIE, Verb.TIE_GRADIENT), SEND_TIME),
    Verb.REDUCE: REDUCE_TIME,
    Verb.UNSHARD: UNSHARD_TIME,
    Verb.GATHER: GATHER_TIME,
    Verb.PUSH: AVERAGE_TIME,
    Verb.PULL: AVERAGE_TIME,
}


def seconds_by_category(trace: Trace) -> dict[str, float]:
    """Seconds of a step by category: means over sampled steps and ranks.

    Background categories are not part of the sum: they overlap with the others.
    """
    own = [DATA_TIME, *COMPUTE_CATEGORIES.values(), AVERAGE_TIME, WAITING_TIME, OTHER_TIME]
    names = [*own, *BACKGROUND_TIMES]
    sums = dict.fromkeys(names, 0.0)
    num_samples = 0
    for step in trace.steps:
        for rank in trace.ranks:
            events = RankEvents(trace.events_of(step=step, rank=rank))
            step_seconds = sum(event.seconds for event in events.events if event.name == STEP_SPAN)
            spent = {WAITING_TIME: sum(event.seconds for event in events.waits)}
            for category, seconds in _spans(events):
                spent[category] = spent.get(category, 0.0) + seconds
            known = sum(seconds for category, seconds in spent.items() if category not in BACKGROUND_TIMES)
            spent[OTHER_TIME] = max(0.0, step_seconds - known)
            for category, seconds in spent.items():
                sums[category] += seconds
            num_samples += 1
    return {name: seconds / max(1, num_samples) for name, seconds in sums.items()}


def _spans(events: RankEvents) -> Iterator[tuple[str, float]]:
    """The category of each span, and its seconds without waits and without what is fused into it."""
    for event in events.events:
        within = Interval(event.start, event.stop)
        if event.name == DATA_SPAN:
            yield DATA_TIME, events.busy_seconds(within)
        elif is_action(event.name):
            is_own = event.lane not in COLLECTIVE_LANES
            nested = events.nested_updates(event.name, within)
            yield (
                CATEGORIES[Verb(event.name[0])],
                events.busy_seconds(within, updates=nested) if is_own else event.seconds,
            )
