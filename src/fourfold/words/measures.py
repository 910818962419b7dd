"""Measures: which of two values of a measure is the better one; what throughput and waiting are.

mode     "min": the smaller value is better, as for a loss; "max": the larger one, as for an accuracy
waiting  the part of the steps' time that a rank communicates in or waits for other ranks; not its waits for data
Law: NaN is never better, and every other value is better than none.
"""

from collections.abc import Sequence

MODES = ("min", "max")


def num_units(unit: str, *, samples: float, tokens: float | None, targets: float | None) -> float:
    """What throughput counts of a step: its samples, the tokens that its inputs show, or the elements of its targets.

    `samples` again where there is nothing else to count.
    """
    if unit == "samples":
        return samples
    return (tokens if unit == "tokens" else None) or targets or samples


def shown_unit(unit: str, *, samples: float, tokens: float | None, targets: float | None) -> str:
    """The unit in which the count of a step may be shown: "samples" if it counts nothing else."""
    is_shown = num_units(unit, samples=samples, tokens=tokens, targets=targets) > samples
    return unit if is_shown or (targets and unit != "tokens") else "samples"


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
