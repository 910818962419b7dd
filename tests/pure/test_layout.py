"""Laws of layouts: for every pair of layouts, the named collective turns one into the other."""

import itertools

import numpy as np
import pytest

from fourfold.words.layout import PARTIAL, WHOLE, Change, Partial, Split, Whole, change, collective_sent_bytes

LAYOUTS = (WHOLE, Split(0), Split(1), PARTIAL)


def local_tensors(tensor, layout, size):
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


def global_tensor(local, layout):
    """The tensor that the ranks' local tensors make up."""
    match layout:
        case Whole():
            assert all(np.array_equal(local[0], other) for other in local)
            return local[0]
        case Split(dim=dim):
            return np.concatenate(local, axis=dim)
        case Partial():
            return np.sum(local, axis=0)
    raise AssertionError(layout)


def apply_collective(local, collective, before, after):
    """The local tensors after a collective, by its definition."""
    size = len(local)
    total = np.sum(local, axis=0)
    match collective:
        case Change.NONE:
            return local
        case Change.ALL_REDUCE:
            return [total.copy() for _ in local]
        case Change.REDUCE_SCATTER:
            return np.split(total, size, axis=after.dim)
        case Change.ALL_GATHER:
            return [np.concatenate(local, axis=before.dim) for _ in local]
        case Change.ALL_TO_ALL:
            pieces = [np.split(part, size, axis=after.dim) for part in local]
            return [np.concatenate([pieces[p][r] for p in range(size)], axis=before.dim) for r in range(size)]
        case Change.VIEW:
            return [np.split(part, size, axis=after.dim)[rank] for rank, part in enumerate(local)]
        case Change.MASK:
            return [part if rank == 0 else np.zeros_like(part) for rank, part in enumerate(local)]
        case Change.PAD:
            placed = []
            for rank, part in enumerate(local):
                slots = [np.zeros_like(part) for _ in range(size)]
                slots[rank] = part
                placed.append(np.concatenate(slots, axis=before.dim))
            return placed
    raise AssertionError(collective)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LAYOUTS, LAYOUTS)))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_changing_the_layout_keeps_the_global_tensor(before, after, size):
    tensor = np.random.default_rng(0).normal(size=(8, 12))
    moved = apply_collective(local_tensors(tensor, before, size), change(before, after), before, after)
    assert [part.shape for part in moved] == [part.shape for part in local_tensors(tensor, after, size)]
    np.testing.assert_allclose(global_tensor(moved, after), tensor, rtol=1e-12)


def test_an_all_reduce_sends_as_much_as_a_reduce_scatter_and_an_all_gather():
    for size in (1, 2, 8):
        sent = {c: collective_sent_bytes(c, whole_bytes=1000, size=size) for c in Change}
        assert sent[Change.ALL_REDUCE] == sent[Change.REDUCE_SCATTER] + sent[Change.ALL_GATHER]
        assert sent[Change.VIEW] == sent[Change.MASK] == sent[Change.PAD] == sent[Change.NONE] == 0
    assert collective_sent_bytes(Change.ALL_REDUCE, whole_bytes=1000, size=2) == 1000
