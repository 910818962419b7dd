"""Laws of the windowed and the mixed order of samples, and of the keyed permutation that they are made of."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.feed.feed import with_ids
from fourfold.orders.keyed_permutation import derive_keys, permute
from fourfold.orders.mixed_order import MAX_AUTO_BLOCK, MixedOrder, MixedPart, choose_quotas, mixture_problems
from fourfold.orders.sample_order import BatchRange, GlobalOrder, InOrder, order_rows, shard_range
from fourfold.orders.windowed_order import WindowedOrder, window_problems

SEEDS, EPOCHS = st.integers(0, 2**63), st.integers(0, 10**6)
EVEN = [9, 3, 5, 4, 6, 8, 0, 2, 7, 1]
UNEVEN = [7, 8, 3, 9, 4, 6, 0, 2, 5, 1]
MIXED = [1, 2, 11, 3, 13, 0]
LARGE = [22307309681, 12759594967, 22307385985, 76322040716]
KEYS = derive_keys("test", 1)
EVEN_SHARDS = st.builds(lambda size, count, last: [size] * count + [min(last, size)], *[st.integers(1, 40)] * 3)
UNEVEN_SHARDS = st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(sum)
SHARDS = st.one_of(EVEN_SHARDS, UNEVEN_SHARDS)


@st.composite
def windowed_orders(draw):
    sizes = draw(SHARDS)
    return WindowedOrder(sizes, draw(st.integers(1, len(sizes))))


@st.composite
def mixed_orders(draw):
    parts = []
    for index in range(draw(st.integers(1, 4))):
        order = draw(st.one_of(st.builds(GlobalOrder, st.integers(1, 200)), windowed_orders()))
        repeat = draw(st.sampled_from([None, 0.5, 1, 1, 2, 3.7]))
        weight = draw(st.one_of(st.integers(1, 9), st.floats(0.3, 3)))
        parts.append(MixedPart(f"part{index}", order, order.num_positions, weight, repeat))
    parts[0] = parts[0]._replace(repeat=parts[0].repeat or 1)
    parts = [part._replace(repeat=1) if part.limit == 0 else part for part in parts]
    order = MixedOrder(parts, draw(st.sampled_from([None, 200, 256])))
    return order, parts


def part_and_number(ids, parts):
    """Of each id: its part, its number in the part, and in which of the epoch's passes it comes."""
    passes, places = np.divmod(ids, sum(part.num_ids for part in parts))
    first_ids = np.cumsum([0, *(part.num_ids for part in parts)])[:-1]
    index = np.searchsorted(first_ids, places, side="right") - 1
    return index, places - first_ids[index], passes


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    seed=SEEDS,
    same=st.booleans(),
    tweak=st.integers(0, 9),
)
def test_a_keyed_permutation_is_a_bijection_of_the_numbers_of_each_tweak(sizes, seed, same, tweak):
    sizes = [sizes[0]] * len(sizes) if same else sizes
    keys = derive_keys(seed)
    numbers = np.concatenate([np.arange(size) for size in sizes])
    tweaks, each = np.repeat(np.arange(len(sizes)) + tweak, sizes), np.repeat(sizes, sizes)
    images = permute(numbers, each, keys, tweaks)
    assert all(
        np.array_equal(np.sort(images[tweaks == tweak + index]), np.arange(size)) for index, size in enumerate(sizes)
    )
    first = permute(np.arange(sizes[0]), sizes[0], keys, np.full(sizes[0], tweak))
    assert np.array_equal(first, images[: sizes[0]])


def test_every_bijection_of_small_numbers_is_one():
    for size in range(1, 600):
        assert np.array_equal(np.sort(permute(np.arange(size), size, KEYS)), np.arange(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 33, 40])
def test_a_keyed_permutation_is_close_to_uniform(size):
    # Of 20,000 tweaks, each number should come to each place about equally often, and so each pair of numbers.
    count = 20_000
    images = permute(np.tile(np.arange(size), count), size, KEYS, np.repeat(np.arange(count), size))
    images = images.reshape(count, size)
    singles = np.array([np.bincount(column, minlength=size) for column in images.T])
    pairs = np.bincount(images[:, 0] * size + images[:, 1], minlength=size * size).reshape(size, size)
    pairs = pairs[~np.eye(size, dtype=bool)]
    for found, freedom in ((singles * (1 - 1 / size) ** 0.5, (size - 1) ** 2), (pairs, size * (size - 1) - 1)):
        expected = count / size if found is not pairs else count / (size * (size - 1))
        deviations = (found - expected * (1 if found is pairs else (1 - 1 / size) ** 0.5)) ** 2 / expected
        assert deviations.sum() < freedom + 5 * math.sqrt(2 * freedom)


@given(order=windowed_orders(), seed=SEEDS, epoch=EPOCHS)
def test_a_windowed_epoch_visits_every_sample_once(order, seed, epoch):
    ids = order_rows(order, seed, epoch, 0, order.num_positions)
    assert np.array_equal(np.sort(ids), np.arange(order.num_positions))


@given(sizes=SHARDS, window=st.integers(1, 60), seed=SEEDS)
def test_a_window_reads_its_own_shards_only_and_no_shard_is_read_twice(sizes, window, seed):
    window = min(window, len(sizes))
    order = WindowedOrder(sizes, window)
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    read = shard_of[order_rows(order, seed, 0, 0, order.num_positions)]
    start, visited = 0, []
    while start < order.num_positions:
        shards = order.shards_of(seed, 0, start, start + 1)
        assert len(shards) <= window
        stop = start + sum(sizes[shard] for shard in shards)
        assert set(read[start:stop]) <= set(shards)
        assert sorted(read[start:stop]) == sorted(np.repeat(shards, [sizes[shard] for shard in shards]))
        start, visited = stop, visited + shards
    assert len(set(visited)) == len(visited)


@given(mixed=mixed_orders(), seed=SEEDS, epoch=st.integers(0, 1000))
@settings(deadline=None)
def test_every_block_holds_its_quotas_and_an_epoch_names_no_sample_twice(mixed, seed, epoch):
    order, parts = mixed
    ids = order_rows(order, seed, epoch, 0, order.num_positions)
    assert len(set(ids.tolist())) == len(ids)
    index, number, _ = part_and_number(ids, parts)
    assert (number < [parts[each].num_ids for each in index]).all()
    for start in range(0, len(ids) - order.block_size + 1, order.block_size):
        block = index[start : start + order.block_size]
        assert np.array_equal(np.bincount(block, minlength=len(parts)), order.quotas)
    taken = np.bincount(index, minlength=len(parts))
    assert np.array_equal(taken, order.samples_per_epoch)
    limits = [part.limit for part in parts]
    assert all(limit is None or count <= limit for count, limit in zip(taken, limits, strict=True))
    # The epoch ends where one of the limited sources has been gone through as often as it may be.
    assert any(count == limit for count, limit in zip(taken, limits, strict=True))


@given(mixed=mixed_orders(), seed=SEEDS)
@settings(deadline=None, max_examples=20)
def test_no_sample_of_a_part_comes_again_before_all_of_the_part_have_come(mixed, seed):
    order, parts = mixed
    ids = np.concatenate([order_rows(order, seed, epoch, 0, order.num_positions) for epoch in range(3)])
    index, number, _ = part_and_number(ids, parts)
    for each, part in enumerate(parts):
        counts = np.bincount(number[index == each], minlength=part.num_ids)
        # Positions are permuted within a block, so the samples of two passes may change places within one.
        assert counts.max() - counts.min() <= 1


@given(order=st.one_of(windowed_orders(), mixed_orders().map(lambda each: each[0])), seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_any_range_of_an_order_can_be_computed_by_itself(order, seed, data):
    start = data.draw(st.integers(0, order.num_positions))
    stop = data.draw(st.integers(start, order.num_positions))
    whole = order_rows(order, seed, 3, 0, order.num_positions)
    assert np.array_equal(order_rows(order, seed, 3, start, stop), whole[start:stop])


ORDERS = st.one_of(
    st.builds(GlobalOrder, st.integers(1, 500)),
    st.builds(InOrder, st.integers(1, 500)),
    windowed_orders(),
    mixed_orders().map(lambda each: each[0]),
)


@given(
    order=ORDERS,
    seed=SEEDS,
    batch_size=st.integers(1, 40),
    ranks=st.integers(1, 5),
    block=st.integers(1, 100),
    data=st.data(),
)
@settings(deadline=None, max_examples=80)
def test_ids_computed_ahead_are_those_of_each_batch_on_every_rank(order, seed, batch_size, ranks, block, data):
    end, first = order.num_positions, data.draw(st.integers(0, order.num_positions - 1))
    starts = range(first, end, batch_size)
    by_rank = []
    for index in range(ranks):
        stops = [min(start + batch_size, end) for start in starts]
        batches = [
            BatchRange(end, seed, 2, start, stop, *shard_range(start, stop, ranks, index), order)
            for start, stop in zip(starts, stops, strict=True)
        ]
        taken = []

        def batches_asked(batches=batches, taken=taken):
            for batch in batches:
                taken.append(batch)
                yield batch

        found = []
        for batch, ids in with_ids(batches_asked(), block=block):
            found.append((batch, ids))
            ahead = taken[len(found) :]  # of an endless feed no more than a block may be kept
            assert sum(each.local_stop - each.local_start for each in ahead) < block + batch_size
        assert found == [(batch, batch.sample_ids()) for batch in batches]
        by_rank.append([ids for _, ids in found])
    order_found = [number for parts in zip(*by_rank, strict=True) for ids in parts for number in ids]
    assert order_found == order_rows(order, seed, 2, first, end).tolist()


@pytest.mark.parametrize("order", [
    WindowedOrder([50] * 20, 4),
    WindowedOrder([50, 49] * 10, 4),
    MixedOrder([MixedPart(name, GlobalOrder(1000), 1000, 1) for name in "ab"], 100),
])  # fmt: skip
def test_every_epoch_and_every_seed_has_its_own_order(order):
    # Never seed + epoch: the next epoch of one seed must not be the first of the next.
    orders = {tuple(order_rows(order, seed, epoch, 0, 300)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_orders_are_frozen():
    # A change of these numbers is a new version: checkpoints name samples by position.
    even, uneven = WindowedOrder([3, 3, 3, 1], 2), WindowedOrder([3, 1, 3, 3], 2)
    assert order_rows(even, 0, 0, 0, 10).tolist() == EVEN
    assert order_rows(uneven, 0, 0, 0, 10).tolist() == UNEVEN
    parts = [MixedPart("a", GlobalOrder(4), 4, 2), MixedPart("b", even, 10, 1, None)]
    assert order_rows(MixedOrder(parts), 0, 1, 0, 6).tolist() == MIXED
    large = WindowedOrder(np.full(10**6, 10**5), 8)
    assert order_rows(large, 7, 3, 5, 9).tolist() == LARGE


@pytest.mark.parametrize(("weights", "quotas"), [
    ([0.7, 0.3], [42, 18]),
    ([2, 2, 4], [16, 16, 32]),
    ([1 / 3, 2 / 3], [21, 42]),
    ([0.123, 0.877], [123, 877]),
    ([5], [64]),
    ([1e-3, 1], [1, 1000]),
])  # fmt: skip
def test_quotas_are_exact_where_a_block_can_hold_them(weights, quotas):
    assert choose_quotas(weights).tolist() == quotas


@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
def test_quotas_are_as_near_as_the_largest_block_allows(weights):
    quotas, shares = choose_quotas(weights), np.array(weights) / sum(weights)
    assert quotas.sum() <= MAX_AUTO_BLOCK
    errors = np.abs(quotas / quotas.sum() / shares - 1)
    largest = choose_quotas(weights, MAX_AUTO_BLOCK)
    assert np.abs(largest - MAX_AUTO_BLOCK * shares).max() < 1
    assert errors.max() <= np.abs(largest / MAX_AUTO_BLOCK / shares - 1).max() + 1e-9


def test_mixtures_without_an_order_are_refused():
    big, small = MixedPart("big", GlobalOrder(100), 100, 1.0), MixedPart("small", GlobalOrder(3), 3, 1e-5)
    assert mixture_problems([big, big], None) == []
    (problem,) = mixture_problems([big, small], None)
    assert (problem.got, problem.attempt) == ("weight 1e-05 of 'small', a share of 1e-05", "a larger weight")
    assert mixture_problems([big, small._replace(weight=1e-4)], None)[0].attempt == "block_size=10001"
    assert mixture_problems([big, small._replace(weight=1e-4)], 10001) == []
    assert "repeat = None only" in mixture_problems([big._replace(repeat=None)], None)[0].got
    assert "repeat = 0.1 of 3 samples of 'small'" in mixture_problems([small._replace(repeat=0.1)], None)[0].got


@pytest.mark.parametrize(("sizes", "window", "message"), [
    (None, 2, "without shard_sizes"),
    ([5, 5], 3, "window = 3, and a source of 2 shards"),
    ([5, 6], 2, "sum to 11"),
    ([5.0, 5.0], 2, "not whole numbers"),
    ([-5, 15], 2, "not whole numbers"),
    ([[5], [5]], 2, "not whole numbers"),
    ("ab", 2, "not whole numbers"),
])  # fmt: skip
def test_windows_without_an_order_are_refused(sizes, window, message):
    (problem,) = window_problems(sizes, window, 10)
    assert message in problem.got
    assert window_problems([5, 5], 2, 10) == []


def test_orders_have_digests_of_what_they_depend_on():
    orders = [
        GlobalOrder(10), GlobalOrder(11), InOrder(10), WindowedOrder([5, 5], 1), WindowedOrder([5, 5], 2),
        WindowedOrder([4, 6], 2), MixedOrder([MixedPart("a", GlobalOrder(10), 10, 1)]),
        MixedOrder([MixedPart("b", GlobalOrder(10), 10, 1)]), MixedOrder([MixedPart("a", GlobalOrder(9), 9, 1)]),
        MixedOrder([MixedPart("a", WindowedOrder([5, 5], 2), 10, 1)]),
        MixedOrder([MixedPart("a", GlobalOrder(10), 10, 1, 2)]),
        MixedOrder([MixedPart("a", GlobalOrder(10), 10, 1)], 2),
    ]  # fmt: skip
    assert len({order.digest() for order in orders}) == len(orders)
    assert WindowedOrder([5, 5], 2).digest() == WindowedOrder(np.array([5, 5], dtype=np.int32), 2).digest()


def test_an_order_of_10_to_the_11_samples_has_no_table():
    shards = np.full(10**6, 10**5)
    parts = [MixedPart("a", WindowedOrder(shards, 8), 10**11, 3), MixedPart("b", GlobalOrder(10**11), 10**11, 1)]
    for order in (WindowedOrder(shards, 8), MixedOrder(parts)):
        ids = order_rows(order, 1, 5, 7 * 10**10, 7 * 10**10 + 1000)
        assert len(set(ids.tolist())) == 1000
        assert ids.min() >= 0
