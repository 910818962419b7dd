"""Layout: how a tensor is stored along one mesh axis, and the collective that changes it.

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
    """What takes a tensor from one layout to another. The last four send nothing between ranks."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    NONE = "none"
    VIEW = "view"  # each rank takes a slice of what it holds
    MASK = "mask"  # index 0 keeps the tensor, all others hold zeros
    PAD = "pad"  # each rank holds its slice, with zeros in place of the other slices


def change(before: Layout, after: Layout) -> Change:
    """The collective, or local operation, that takes a tensor from layout `before` to layout `after`."""
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
    """Bytes that each of `size` ranks sends for a tensor of `whole_bytes`, with bandwidth-optimal (ring) algorithms.

    As a fraction of the whole tensor: all-reduce 2 (N−1)/N, reduce-scatter and all-gather (N−1)/N, all-to-all
    (N−1)/N² (Thakur, Rabenseifner, Gropp 2005).
    """
    once = (size - 1) / size
    fraction_sent = {
        Change.ALL_REDUCE: 2 * once,
        Change.REDUCE_SCATTER: once,
        Change.ALL_GATHER: once,
        Change.ALL_TO_ALL: once / size,
    }
    return fraction_sent.get(collective, 0.0) * whole_bytes
