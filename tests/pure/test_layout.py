"""Laws of layouts: the named collective, done to numbers, turns one layout into the other, for every pair."""

import itertools

import numpy as np
import pytest

from fourfold.words.layout import PARTIAL, WHOLE, Change, Partial, Split, Whole, change, collective_sent_bytes

LAYOUTS = (WHOLE, Split(0), Split(1), PARTIAL)


def lay(tensor, layout, size):
    """What each rank holds of a tensor in a layout."""
    match layout:
        case Whole():
            return [tensor.copy() for _ in range(size)]
        case Split(dim=dim):
            return np.split(tensor, size, axis=dim)
        case Partial():
            weights = np.arange(1, size + 1) / (size * (size + 1) / 2)
            return [tensor * weight for weight in weights]
    raise AssertionError(layout)


def read(held, layout):
    """The tensor that ranks hold together."""
    match layout:
        case Whole():
            assert all(np.array_equal(held[0], other) for other in held)
            return held[0]
        case Split(dim=dim):
            return np.concatenate(held, axis=dim)
        case Partial():
            return np.sum(held, axis=0)
    raise AssertionError(layout)


def move(held, collective, before, after):
    """The collective, by its definition."""
    size = len(held)
    total = np.sum(held, axis=0)
    match collective:
        case Change.NONE:
            return held
        case Change.ALL_REDUCE:
            return [total.copy() for _ in held]
        case Change.REDUCE_SCATTER:
            return np.split(total, size, axis=after.dim)
        case Change.ALL_GATHER:
            return [np.concatenate(held, axis=before.dim) for _ in held]
        case Change.ALL_TO_ALL:
            pieces = [np.split(part, size, axis=after.dim) for part in held]
            return [np.concatenate([pieces[p][r] for p in range(size)], axis=before.dim) for r in range(size)]
        case Change.VIEW:
            return [np.split(part, size, axis=after.dim)[rank] for rank, part in enumerate(held)]
        case Change.MASK:
            return [part if rank == 0 else np.zeros_like(part) for rank, part in enumerate(held)]
        case Change.PAD:
            placed = []
            for rank, part in enumerate(held):
                slots = [np.zeros_like(part) for _ in range(size)]
                slots[rank] = part
                placed.append(np.concatenate(slots, axis=before.dim))
            return placed
    raise AssertionError(collective)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LAYOUTS, LAYOUTS)))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_changing_the_layout_keeps_the_global_tensor(before, after, size):
    tensor = np.random.default_rng(0).normal(size=(8, 12))
    moved = move(lay(tensor, before, size), change(before, after), before, after)
    assert [part.shape for part in moved] == [part.shape for part in lay(tensor, after, size)]
    np.testing.assert_allclose(read(moved, after), tensor, rtol=1e-12)


def test_an_all_reduce_sends_as_much_as_a_reduce_scatter_and_an_all_gather():
    for size in (1, 2, 8):
        sent = {c: collective_sent_bytes(c, whole_bytes=1000, size=size) for c in Change}
        assert sent[Change.ALL_REDUCE] == sent[Change.REDUCE_SCATTER] + sent[Change.ALL_GATHER]
        assert sent[Change.VIEW] == sent[Change.MASK] == sent[Change.PAD] == sent[Change.NONE] == 0
    assert collective_sent_bytes(Change.ALL_REDUCE, whole_bytes=1000, size=2) == 1000
