"""Laws of the order of samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.orders.sample_order import rows, shard_range

COUNTS = st.integers(1, 3000)
SEEDS = st.integers(0, 2**63)


@given(count=COUNTS, seed=SEEDS, epoch=st.integers(0, 100))
def test_an_epoch_visits_every_sample_once(count, seed, epoch):
    assert np.array_equal(np.sort(rows(count, seed, epoch, 0, count)), np.arange(count))


@given(count=COUNTS, seed=SEEDS, data=st.data())
def test_any_range_of_the_order_can_be_computed_by_itself(count, seed, data):
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    assert np.array_equal(rows(count, seed, 0, start, stop), rows(count, seed, 0, 0, count)[start:stop])


@given(start=st.integers(0, 1000), length=st.integers(0, 1000), size=st.integers(1, 17))
def test_shards_tile_a_range_and_differ_by_at_most_one(start, length, size):
    ranges = [shard_range(start, start + length, size, index) for index in range(size)]
    assert ranges[0][0] == start
    assert ranges[-1][1] == start + length
    assert all(ranges[i][1] == ranges[i + 1][0] for i in range(size - 1))
    assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1


def test_every_epoch_and_every_seed_has_its_own_order():
    # Never seed + epoch: the next epoch of one seed must not be the first of the next.
    orders = {tuple(rows(1000, seed, epoch, 0, 1000)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_frozen():
    # A change of these numbers is a new ORDER_VERSION: checkpoints name samples by position.
    assert rows(10, 0, 0, 0, 10).tolist() == [4, 9, 6, 5, 3, 0, 8, 2, 1, 7]
    assert rows(10**11, 7, 3, 5, 9).tolist() == [11413235759, 58722586898, 79197322119, 54553001130]


def test_an_order_is_close_to_uniform():
    # Every sample should come first about equally often: chi-square over 20 samples and 4000 seeds.
    first = np.array([rows(20, seed, 0, 0, 1)[0] for seed in range(4000)])
    counts = np.bincount(first, minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # 99.9 % of chi-square with 19 degrees


def test_neighbours_do_not_stay_neighbours():
    order = rows(100_000, 1, 0, 0, 100_000)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert np.mean(np.diff(order) == 1) < 0.001


def test_positions_outside_an_epoch_are_refused():
    with pytest.raises(IndexError, match="outside an epoch of 10 samples"):
        rows(10, 0, 0, 5, 11)
