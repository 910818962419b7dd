"""Measures: which of two values of a measure is the better one; what loss, throughput, waiting and time left are.

mode     "min": the smaller value is better, as for a loss; "max": the larger one, as for an accuracy
waiting  the part of the steps' time that a rank communicates in or waits for other ranks; not its waits for data
start    of a run, or of its part since it resumed: the rate and the time left are of the steps since the last one
Law: the terminal and the page compute each of these here, of the same steps.
Law: NaN is never better, and every other value is better than none.
"""

from collections.abc import Sequence

MODES = ("min", "max")
AVERAGED_STEPS = 20  # that a mean of the last steps is of


def training_loss(losses: Sequence[float]) -> float:
    """The mean of the last steps, of the losses of those that have trained: a skipped step is none of them."""
    recent = losses[-AVERAGED_STEPS:]
    return sum(recent) / len(recent) if recent else float("nan")


def recent_rate(units: Sequence[float], ends: Sequence[float]) -> float:
    """Units a second of the last steps since a start. `ends`: when each has ended, in seconds after the start."""
    ends = [0.0, *ends][-AVERAGED_STEPS - 1 :]
    return sum(units[-AVERAGED_STEPS:]) / max(ends[-1] - ends[0], 1e-9)


def remaining_seconds(num_done: int, num_left: int, *, first_end: float, last_end: float) -> float:
    """The time of `num_left` steps, with what lies between steps. Of those since a start, the first is slow: it counts
    only while it is alone. It and the last have ended so many seconds after the start.
    """
    mean = (last_end - first_end) / (num_done - 1) if num_done > 1 else last_end
    return mean * max(num_left, 0)


def count_units(unit: str, *, samples: float, tokens: float | None, targets: float | None) -> tuple[float, str]:
    """What throughput counts of a step, and its name: the tokens that its inputs show, or the elements of its targets;
    samples where that is the unit, or there is nothing else to count.
    """
    counted = 0 if unit == "samples" else (unit == "tokens" and tokens) or targets or 0
    return (counted, unit) if counted > (samples if unit == "tokens" else 0) else (samples, "samples")


def waiting_fraction(steps: Sequence[tuple[float, float]]) -> float:
    """0 to 1, of steps that have waited and taken so many seconds."""
    return sum(waited for waited, _ in steps) / max(sum(taken for _, taken in steps), 1e-9)


def is_better(value: float | None, best: float | None, mode: str, *, min_delta: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than `min_delta`."""
    if value is None or value != value:
        return False
    if best is None or best != best:
        return True
    return best - value > min_delta if mode == "min" else value - best > min_delta
