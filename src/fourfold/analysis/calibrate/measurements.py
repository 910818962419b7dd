"""Measurements: what each rank has found, as JSON that ranks exchange, and what all of them take for it.

mean     over the ranks, of what they do together
slowest  the rank that takes longest over all segments: a step ends with it
Law: the result has the form of one rank's measurements, and every rank computes the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.parts.comm.communicator import Communicator


def mean_over_ranks(value: Any, ranks: Communicator) -> Any:
    """The mean of a number, or of the numbers in lists and dicts of them. Collective."""
    return _mean(ranks.all_gather_json(value))


def of_slowest_rank(rows: list[list[float]], ranks: Communicator) -> list[list[float]]:
    """The rows of the rank whose numbers add up to most. Collective."""
    return max(ranks.all_gather_json(rows), key=lambda each: sum(map(sum, each)))


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([each[key] for each in values]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(values) / len(values)
