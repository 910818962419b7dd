"""Laws of a feed's orders: windowed and mixed, over ranks, batch sizes and kills; what is refused."""

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import fourfold as ff
from fourfold.feed.position import Position
from fourfold.trainer.evaluate import evaluate
from fourfold.words.errors import CheckpointError, DataError, FourfoldError
from tests.simulated.test_feed import Interrupted, interrupted


class Numbers:
    """Samples that are their own numbers, plus an offset, in shards."""

    def __init__(self, shard_sizes, offset=0):
        self.shard_sizes, self.offset = shard_sizes, offset

    def __len__(self):
        return sum(self.shard_sizes)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        return torch.tensor([float(self.offset + index)], dtype=torch.float64), self.offset + index


class Fetching(Numbers):
    """The same, with a fetch of its own."""

    def fetch(self, indices):
        numbers = torch.as_tensor(list(indices), dtype=torch.int64) + self.offset
        return numbers.double()[:, None], numbers


def mixture(kind=Numbers):
    return ff.Mixed({
        "a": ff.Weighted(kind([5, 5, 5, 4]), 2, order="windowed", window=2),
        "b": ff.Weighted(kind([3, 8], offset=100), 1, repeat=None),
    })  # fmt: skip


SOURCES = {
    "global": (lambda: Numbers([7] * 5), {}),
    "windowed": (lambda: Numbers([7] * 5), {"order": "windowed", "window": 2}),
    "windowed uneven": (lambda: Fetching([3, 0, 9, 8, 1]), {"order": "windowed", "window": 3}),
    "mixed": (mixture, {}),
    "mixed fetch": (lambda: mixture(Fetching), {}),
}


def feeds(source, size, **options):
    """The feeds of all data ranks."""
    result = [ff.Feed(source, **options) for _ in range(size)]
    for index, feed in enumerate(result):
        feed._size, feed._index = size, index
    return result


def joined(lists):
    return list(itertools.chain(*lists))


def global_batches(ranks, count):
    """The next batches of all ranks, put together."""
    loops = [feed.repeat() for feed in ranks]
    found = [joined(next(loop)[1].tolist() for loop in loops) for _ in range(count)]
    for loop in loops:
        loop.close()
    return found


@pytest.mark.parametrize("kind", SOURCES)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), counts=st.data(), seed=st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=6)
def test_kills_and_changes_of_the_number_of_ranks_change_no_global_batch(kind, sizes, counts, seed):
    make, options = SOURCES[kind]
    options = {**options, "batch_size": 6, "seed": seed}
    expected = global_batches(feeds(make(), 1, **options), 14)
    state, found = None, []
    for size in [*sizes, 1]:  # each process is killed after some batches, and the next has another number of ranks
        ranks = feeds(make(), size, **options)
        for feed in ranks if state is not None else ():
            feed.load_state_dict(json.loads(json.dumps(state)))
        left = 14 - len(found)
        found += global_batches(ranks, counts.draw(st.integers(0, left)) if len(found) < 14 else 0)
        assert len({json.dumps(feed.state_dict()) for feed in ranks}) == 1
        state = ranks[0].state_dict()
    assert found == expected[: len(found)]


@pytest.mark.parametrize("kind", SOURCES)
@given(first=st.integers(1, 9), second=st.integers(1, 9), count=st.integers(0, 4))
@settings(deadline=None, max_examples=6)
def test_another_batch_size_goes_on_in_the_same_order(kind, first, second, count):
    make, options = SOURCES[kind]
    (whole,), (before,), (after,) = (feeds(make(), 1, batch_size=size, **options) for size in (1, first, second))
    length = whole.num_samples
    order = joined(batch[1].tolist() for batch in whole)
    assert len(order) == length
    count = min(count, (len(order) - 1) // first)
    head = joined(global_batches([before], count))
    after.load_state(before.state)
    assert head + joined(batch[1].tolist() for batch in after) == order


@pytest.mark.parametrize("kind", [Numbers, Fetching])
def test_an_epoch_of_a_mixture_takes_its_sources_by_weight(kind):
    source = mixture(kind)
    assert (source.quotas, source.max_error) == ({"a": 42, "b": 21}, pytest.approx(0))
    assert len(source) == 30
    for epoch in range(3):
        feed = ff.Feed(source, batch_size=4, seed=epoch)
        assert feed.num_samples == source.sample_order.num_positions == 29
        taken = joined(batch[1].tolist() for batch in feed)
        assert sorted(number for number in taken if number < 100) == list(range(19))
        of_b = [number for number in taken if number >= 100]
        assert len(set(of_b)) == len(of_b) == 10
        for inputs, targets in feed:
            assert torch.equal(inputs[:, 0].long(), targets)


@pytest.mark.parametrize("kind", [Numbers, Fetching])
def test_read_by_number_a_mixture_has_each_sample_once(kind):
    source: Any = mixture(kind)
    numbers = [*range(19), *range(100, 111)]
    assert [source[index][1] for index in range(len(source))] == numbers
    in_order = DataLoader(source, batch_size=4)  # a DataLoader gives its workers and collate function, not its order
    assert ff.Feed(in_order).num_samples == 29
    assert source.sample_key(20) == "b: 1"
    step = ff.parallelize(torch.nn.Linear(1, 1).double(), lambda outputs, targets: outputs[:, 0], torch.optim.SGD)
    task = ff.Task(model=torch.nn.Identity, loss=None, data=lambda: ff.Data(train=source), optimizer=torch.optim.SGD,
                   evaluate=lambda outputs, targets: {"sum": (targets.sum(), 1)})  # fmt: skip
    sums = evaluate(step, task, source, 4).metrics
    assert sums["sum"] * 8 == sum(numbers)


def test_samples_of_a_second_pass_of_an_epoch_draw_other_random_numbers():
    class Drawing(Numbers):
        def __getitem__(self, index):
            return torch.rand(2, dtype=torch.float64), super().__getitem__(index)[1]

    parts = {"a": ff.Weighted(Drawing([12]), 1), "b": ff.Weighted(Drawing([4], offset=100), 1, repeat=None)}
    drawn = {}
    for size in (1, 3):
        for feed in feeds(ff.Mixed(parts), size, batch_size=6):
            for inputs, targets in feed:
                for row, number in zip(inputs.tolist(), targets.tolist(), strict=True):
                    drawn.setdefault((size, number), []).append(tuple(row))
    of_b = [drawn[1, number] for number in range(100, 104)]
    assert {len(set(rows)) for rows in of_b} == {3}
    assert all(sorted(drawn[1, number]) == sorted(drawn[3, number]) for number in range(100, 104))


def test_the_state_of_10_to_the_9_samples_is_small_and_in_no_order_a_table():
    many = Numbers([10**5] * 10**4)
    parts = {f"a source with a long name {index}" * 5: ff.Weighted(many, index + 1) for index in range(9)}
    for source, options in [(many, {}), (many, {"order": "windowed", "window": 4}), (ff.Mixed(parts), {})]:
        feed = ff.Feed(source, batch_size=32, **options)
        feed.load_state(Position(0, 3, 5 * 10**8, feed.num_samples))
        assert len(next(iter(feed))[1].unique()) == 32
        assert feed.state.position == 5 * 10**8 + 32
        assert len(json.dumps(feed.state_dict())) < 1000


OTHER_ORDERS = {
    "window": (Numbers([5] * 6), {"order": "windowed", "window": 3}, "windowed, window 2 of 6 shards; now: windowed, "),
    "kind": (Numbers([5] * 6), {}, "saved in the order: windowed, window 2 of 6 shards; now: global"),
    "unshuffled": (Numbers([5] * 6), {"shuffle": False}, "now: in the source"),
    "shards": (Numbers([4, 6] * 3), {"order": "windowed", "window": 2}, "of other shards, sources or weights"),
    "mixture": (mixture(), {}, "now: mixed, blocks of 63: a 42, b 21"),
}


@pytest.mark.parametrize("kind", OTHER_ORDERS)
def test_a_state_of_another_order_is_refused_with_the_reason(kind):
    saved = ff.Feed(Numbers([5] * 6), batch_size=4, order="windowed", window=2)
    next(iter(saved))
    source, options, message = OTHER_ORDERS[kind]
    feed = ff.Feed(source, batch_size=4, **options)
    with pytest.raises(DataError, match=message):
        feed.load_state_dict(saved.state_dict())
    assert feed.state.position == 0


def test_a_source_may_grow_between_epochs_and_a_mixture_may_not():
    saved, grown = (ff.Feed(Numbers([5] * 3 + last), batch_size=5, order="windowed", window=2) for last in ([5], [4]))
    grown.load_state_dict(saved.state_dict())
    next(iter(saved))
    with pytest.raises(DataError, match="position 5 in an epoch of 20 samples, and a source of 19 now"):
        grown.load_state_dict(saved.state_dict())
    made = [ff.Mixed({"a": ff.Weighted(Numbers([size]), 1)}) for size in (20, 19)]
    with pytest.raises(DataError, match="of other shards, sources or weights"):
        ff.Feed(made[1], batch_size=5).load_state_dict(ff.Feed(made[0], batch_size=5).state_dict())


@pytest.mark.parametrize("state", [None, {}, {"seed": 0}, {"version": 2}, [0, 0, 0, 1]])
def test_what_is_no_state_dict_is_refused(state):
    feed = ff.Feed(Numbers([5]), batch_size=2)
    if isinstance(state, dict) and "version" in state:
        state = {**feed.state_dict(), **state}
    with pytest.raises(DataError, match=r"state_dict\(\) of a feed|a state of version 2"):
        feed.load_state_dict(state)


NUMBERED: Any = Numbers([5])


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(("source", "options", "message"), [
    (Numbers([5, 5]), {"order": "windowed", "window": 3}, "window = 3, and a source of 2 shards .* window=2"),
    (Numbers([5, 5]), {"order": "windowed"}, "without a window"),
    (Numbers([5, 5]), {"order": "windowed", "window": 0}, "window = 0"),
    (Numbers([5, 5]), {"window": 2}, "window = 2, and order = None"),
    (Numbers([5, 5]), {"order": "random"}, "order = 'random' .* global or windowed"),
    (Numbers([5, 5]), {"order": "global", "shuffle": False}, "order = 'global' and shuffle = False"),
    ([(1, 2)] * 4, {"order": "windowed", "window": 1}, "without shard_sizes .* a pack, or order='global'"),
    (mixture(), {"order": "global"}, "order = 'global', and a mixture"),
    (mixture(), {"shuffle": False}, "shuffle = False, and a mixture"),
    (Endless(), {"order": "global"}, "order = 'global', and a stream"),
    (Numbers([5, 5]), {"bad_samples": -1}, "bad_samples = -1"),
])  # fmt: skip
def test_impossible_orders_are_refused(source, options, message):
    with pytest.raises(DataError, match=message):
        ff.Feed(source, batch_size=2, **options)


@pytest.mark.parametrize(("sources", "options", "message"), [
    ({}, {}, "need named sources with weights"),
    ([Numbers([5])], {}, "need named sources with weights"),
    ({"a": Numbers([5])}, {}, "need named sources with weights"),
    ({"a": ff.Weighted(Numbers([5]), 0)}, {}, "weight of 'a' = 0 .* a number above 0"),
    ({"a": ff.Weighted(Numbers([5]), -1), "b": ff.Weighted(Numbers([5]), float("nan"))}, {}, "(?s)-1 .* = nan"),
    ({"a": ff.Weighted(Numbers([5]), float("inf"))}, {}, "weight of 'a' = inf"),
    ({"a": ff.Weighted(Numbers([5]), 1, repeat=0)}, {}, "repeat of 'a' = 0"),
    ({"a": ff.Weighted(Numbers([5]), 1, repeat=None)}, {}, "sources with repeat = None only"),
    ({"a": ff.Weighted(Numbers([]), 1)}, {}, "'a' without samples"),
    ({"a": ff.Weighted(Numbers([5]), 1, order="windowed", window=2)}, {}, "a: window = 2, and a source of 1 shards"),
    ({"a": ff.Weighted(Numbers([5]), 1, order="any")}, {}, "order of 'a' = 'any'"),
    ({"a": ff.Weighted(DataLoader(NUMBERED), 1)}, {}, "'a' = a DataLoader .* its dataset"),
    ({"a": ff.Weighted(mixture(), 1)}, {}, "'a' = a mixture .* all sources in one mixture"),
    ({"a": ff.Weighted(Numbers([5]), 1)}, {"block_size": 0}, "block_size = 0"),
    ({"a": ff.Weighted(Numbers([5]), 1)}, {"block_size": 10**6}, "block_size = 1000000 .* at most 65536"),
])  # fmt: skip
def test_impossible_mixtures_are_refused(sources, options, message):
    with pytest.raises(DataError, match=message):
        ff.Mixed(sources, **options)


def test_sources_whose_samples_differ_in_form_are_named():
    class Wide(Fetching):
        def fetch(self, indices):
            inputs, targets = super().fetch(indices)
            return inputs.expand(-1, 2), targets

    source = ff.Mixed({"narrow": ff.Weighted(Fetching([8]), 1), "wide": ff.Weighted(Wide([8]), 1)})
    with pytest.raises(DataError, match=r"float64 \[1\] in narrow; float64 \[2\] in wide"):
        next(iter(ff.Feed(source, batch_size=8)))


def trained(folder, source, name="run", *, steps=9, schedule=None, **options):
    task = ff.Task(
        model=lambda: torch.nn.Linear(1, 1).double(),
        loss=lambda outputs, targets: (outputs[:, 0] - targets / 100).square(),
        data=lambda: ff.Data(train=source, valid=source),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-5),
        schedule=schedule,
        steps=steps,
        batch_size=4,
    )
    how = {"folder": str(folder), "name": name, "quiet": True, "checkpoint_every": 2, **options}
    return ff.train(task, ff.Plan(), **how).valid


@pytest.mark.parametrize("kind", ["windowed", "mixed"])
def test_a_run_resumes_in_its_order_and_refuses_another(kind, tmp_path):
    make, options = SOURCES[kind]
    expected = trained(tmp_path, make(), "whole", **options)
    with pytest.raises(Interrupted):
        trained(tmp_path, make(), schedule=interrupted, **options)
    others = {
        "windowed": (Numbers([6, 8] + [7] * 3), options, "of other shards, sources or weights"),
        "mixed": (
            ff.Mixed({"a": ff.Weighted(Numbers([29]), 1)}), {}, "blocks of 63: a 42, b 21; now: mixed, blocks of 64"
        ),
    }  # fmt: skip
    source, other, message = others[kind]
    with pytest.raises(CheckpointError, match=message):
        trained(tmp_path, source, **other)
    assert trained(tmp_path, make(), **options) == expected


def test_another_order_of_the_same_run_is_another_run(tmp_path):
    with pytest.raises(Interrupted):
        trained(tmp_path, Numbers([5] * 7), schedule=interrupted, order="windowed", window=2)
    with pytest.raises(FourfoldError, match="window"):
        trained(tmp_path, Numbers([5] * 7), order="windowed", window=3)
