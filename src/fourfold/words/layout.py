"""Layout: where a tensor rests along one axis, and what it costs to move it.

whole       every rank holds all of it
split(dim)  every rank holds an equal slice of dim
partial     every rank holds an addend; the tensor is the sum
Law: a collective is never chosen by hand; it is `change(before, after)`, defined for every pair.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Whole:
    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Split:
    dim: int = 0

    def __str__(self) -> str:
        return f"split({self.dim})"


@dataclass(frozen=True)
class Partial:
    def __str__(self) -> str:
        return "partial"


Layout = Whole | Split | Partial
WHOLE, SPLIT, PARTIAL = Whole(), Split(), Partial()


class Change(StrEnum):
    """What happens between two layouts. The last three move nothing between ranks."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    NONE = "none"
    VIEW = "view"  # a slice of what is there already
    MASK = "mask"  # the whole on index 0, zeros elsewhere
    PAD = "pad"  # the slice in its place, zeros around it


def change(before: Layout, after: Layout) -> Change:
    """The collective that takes a tensor from one layout to another."""
    match before, after:
        case (Whole(), Whole()) | (Partial(), Partial()):
            return Change.NONE
        case Split(dim=old), Split(dim=new):
            return Change.NONE if old == new else Change.ALL_TO_ALL
        case Partial(), Whole():
            return Change.ALL_REDUCE
        case Partial(), Split():
            return Change.REDUCE_SCATTER
        case Split(), Whole():
            return Change.ALL_GATHER
        case Whole(), Split():
            return Change.VIEW
        case Whole(), Partial():
            return Change.MASK
        case Split(), Partial():
            return Change.PAD
    raise AssertionError((before, after))


def collective_sent_bytes(collective: Change, *, whole_bytes: int, size: int) -> float:
    """Bytes each of `size` ranks sends for a tensor of `whole_bytes`, with bandwidth-optimal (ring) algorithms.

    Thakur, Rabenseifner, Gropp 2005: all-reduce 2 (N−1)/N, reduce-scatter and all-gather (N−1)/N,
    all-to-all (N−1)/N² of the whole.
    """
    part = (size - 1) / size
    share = {
        Change.ALL_REDUCE: 2 * part,
        Change.REDUCE_SCATTER: part,
        Change.ALL_GATHER: part,
        Change.ALL_TO_ALL: part / size,
    }
    return share.get(collective, 0.0) * whole_bytes
