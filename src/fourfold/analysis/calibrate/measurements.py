"""Measurements: what one rank has found, as JSON that ranks exchange, and the means over the ranks.

Law: the mean of the ranks' measurements has their form, and every rank computes the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.parts.comm.communicator import Communicator


def mean_over_ranks(value: Any, ranks: Communicator) -> Any:
    """The mean of a number, or of the numbers in lists and dicts of them. Collective."""
    return _mean(ranks.all_gather_json(value))


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([each[key] for each in values]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(values) / len(values)
