"""Measures: which of two values of a measure is the better one.

mode  "min": the smaller value is better, as for a loss; "max": the larger one, as for an accuracy
Law: NaN is never better, and every other value is better than none.
"""

MODES = ("min", "max")


def is_better(value: float | None, best: float | None, mode: str, *, min_delta: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than `min_delta`."""
    if value is None or value != value:
        return False
    if best is None or best != best:
        return True
    return best - value > min_delta if mode == "min" else value - best > min_delta
