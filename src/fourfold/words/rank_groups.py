"""Rank groups: which ranks have the same value, and how a message names them."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def ranks_by_value(values: Mapping[int, Value]) -> list[tuple[Value, list[int]]]:
    """The ranks of each value, the fewest first: they are the likeliest to be wrong."""
    groups: dict[Value, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return sorted(groups.items(), key=lambda row: (len(row[1]), row[1]))


def format_ranks(ranks: Sequence[int], one: str = "", many: str = "") -> str:
    """The ranks, followed by a verb in the form that fits: `rank 1 is`, `ranks 0, 2 and 3 are`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}".rstrip()
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} {many}".rstrip()


def format_groups(texts: Mapping[int, str], one: str = "has", many: str = "have") -> str:
    """What each group of ranks has: `rank 1 has 0.5; ranks 0 and 2 have 0.1`."""
    return "; ".join(f"{format_ranks(ranks, one, many)} {text}" for text, ranks in ranks_by_value(texts))
