"""Laws of `ff.shard`: over all data ranks, every sample of a loader comes once an epoch."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data

import fourfold as ff
from fourfold.comm import init
from fourfold.environment.world import World
from fourfold.feed.dataloader import ShardSampler
from fourfold.plan.plan import Plan
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from fourfold.words.errors import DataError

pytestmark = pytest.mark.usefixtures("without_dry_run")


class Numbers(data.Dataset):
    """Sample i is i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(float(index))


def sharded(loader, size, rank, plan=None, **options):
    """The loader of rank `rank` of `size`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "world", lambda: World(rank=rank, size=size))
        return ff.shard(loader, plan, **options)


def epochs(loader, count=1):
    """The batches of some epochs, as lists of sample numbers."""
    return [[batch.tolist() for batch in loader] for _ in range(count)]


GIVEN = {
    "length": st.integers(1, 60),
    "size": st.integers(1, 5),
    "batch_size": st.integers(1, 7),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
}


@given(**GIVEN)
def test_every_sample_comes_once_an_epoch_and_all_ranks_have_equally_many_batches(
    length, size, batch_size, shuffle, drop_last
):
    loader = data.DataLoader(Numbers(length), batch_size, shuffle=shuffle, drop_last=drop_last)
    if length < size * (batch_size if drop_last else 1):
        with pytest.raises(DataError, match=f"{length} samples for {size} data ranks"):
            sharded(loader, size, 0)
        return
    loaders = [sharded(loader, size, rank) for rank in range(size)]
    by_rank = [epochs(each)[0] for each in loaders]
    assert [len(each) for each in loaders] == [len(batches) for batches in by_rank]
    assert len({len(batches) for batches in by_rank}) == 1
    for step in zip(*by_rank, strict=True):
        sizes = [len(batch) for batch in step]
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
    seen = [int(number) for batches in by_rank for batch in batches for number in batch]
    remainder = length % (size * batch_size)
    if drop_last:
        assert len(seen) == len(set(seen)) == length - remainder
    else:
        assert set(seen) == set(range(length))
        assert len(seen) - length == (size - remainder if 0 < remainder < size else 0)


@given(length=st.integers(5, 60), size=st.integers(1, 5), batch_size=st.integers(1, 7), seed=st.integers(0, 3))
def test_a_shuffled_loader_has_the_batches_of_a_feed(length, size, batch_size, seed):
    loader = data.DataLoader(Numbers(length), batch_size, shuffle=True)
    pairs = [(torch.tensor(float(number)), 0) for number in range(length)]
    for rank in range(size):
        plan = Plan(dp=size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(init, "world", lambda rank=rank: World(rank=rank, size=size))
            fed = ff.Feed(pairs, plan, batch_size=size * batch_size, seed=seed)
            expected = [[batch[0].tolist() for batch in fed] for _ in range(2)]
        result = epochs(sharded(loader, size, rank, seed=seed), 2)
        for ours, theirs in zip(result, expected, strict=True):
            assert all(actual == wanted for actual, wanted in zip(ours, theirs, strict=True) if wanted)


def test_epochs_differ_and_can_be_set():
    loader = sharded(data.DataLoader(Numbers(20), 4, shuffle=True), 2, 1)
    first, second, third = epochs(loader, 3)
    assert sorted(itertools.chain(*first)) != sorted(itertools.chain(*second))
    assert len({str(each) for each in (first, second, third)}) == 3
    assert isinstance(loader.sampler, ShardSampler)
    loader.sampler.set_epoch(1)
    assert epochs(loader, 2) == [second, third]
    assert epochs(sharded(data.DataLoader(Numbers(20), 4, shuffle=True), 2, 1, seed=1))[0] != first


def test_an_interrupted_epoch_counts_as_an_epoch_also_with_workers():
    plain, working = data.DataLoader(Numbers(12), 2, shuffle=True), {"num_workers": 1, "persistent_workers": True}
    working = data.DataLoader(Numbers(12), 2, shuffle=True, **working)
    plain, working = sharded(plain, 2, 0), sharded(working, 2, 0)
    for loader in (plain, working):
        next(iter(loader))
    assert epochs(plain, 2) == epochs(working, 2)


def test_samples_come_in_order_without_shuffling():
    loaders = [sharded(data.DataLoader(Numbers(10), 2), 2, rank) for rank in range(2)]
    assert [epochs(each, 2) for each in loaders] == [
        [[[0.0, 1.0], [4.0, 5.0], [8.0]]] * 2,
        [[[2.0, 3.0], [6.0, 7.0], [9.0]]] * 2,
    ]


def test_the_ranks_of_a_sequence_group_get_the_same_samples():
    plan = Plan(dp=2, cp=2)
    loader = data.DataLoader(Numbers(16), 2, shuffle=True)
    result = [epochs(sharded(loader, 4, rank, plan))[0] for rank in range(4)]
    by_index = {}
    for rank, batches in enumerate(result):
        by_index.setdefault(plan.mesh.coordinates(rank)["dp"], []).append(batches)
    assert all(first == second for first, second in by_index.values())
    assert sorted(itertools.chain(*by_index[0][0], *by_index[1][0])) == list(range(16))


def collate(samples):
    return torch.stack(samples) + 100


def test_all_other_options_of_the_loader_are_kept():
    options = {
        "num_workers": 2, "collate_fn": collate, "timeout": 3.0, "worker_init_fn": collate,
        "prefetch_factor": 3, "persistent_workers": True, "multiprocessing_context": "spawn", "in_order": False,
    }  # fmt: skip
    loader = data.DataLoader(Numbers(9), 3, shuffle=True, drop_last=True, **options)
    result = sharded(loader, 3, 1)
    for name in (*options, "pin_memory", "pin_memory_device", "dataset", "batch_size", "drop_last"):
        assert getattr(result, name) is getattr(loader, name) or getattr(result, name) == getattr(loader, name), name
    assert epochs(sharded(data.DataLoader(Numbers(4), 2, collate_fn=collate), 2, 1)) == [[[102.0, 103.0]]]


class Augmented(Numbers):
    """Samples that draw random numbers, in a worker."""

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])


def drawn_by_workers(size, rank, plan=None, *, seed=0, **options):
    """The random numbers that a rank's samples draw in two epochs. All ranks have the same seed, as in most scripts."""
    torch.manual_seed(0)
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    loader = data.DataLoader(Augmented(4), 2, num_workers=1, **options)
    return str(epochs(sharded(loader, size, rank, plan, seed=seed), 2))


@pytest.mark.parametrize("options", [{}, {"generator": 7}])
def test_workers_of_different_data_ranks_draw_different_random_numbers(options):
    first, second = drawn_by_workers(2, 0, **options), drawn_by_workers(2, 1, **options)
    assert first != second
    assert drawn_by_workers(2, 0, **options) == first
    assert drawn_by_workers(2, 0, **options, seed=1) != first
    assert drawn_by_workers(2, 0, generator=8) != first
    plan = Plan(dp=2, cp=2)
    assert drawn_by_workers(4, 2, plan, **options) == drawn_by_workers(4, 3, plan, **options) == second


def test_one_data_rank_keeps_the_generator_of_its_loader():
    generator = torch.Generator()
    assert sharded(data.DataLoader(NUMBERS, 2, generator=generator), 1, 0).generator is generator


def test_a_loader_without_batching_is_sharded_by_its_items():
    loader = data.DataLoader(Numbers(6), batch_size=None)
    assert epochs(sharded(loader, 2, 1)) == [[1.0, 3.0, 5.0]]


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


class OwnLoader(data.DataLoader):
    def __iter__(self):
        return super().__iter__()


NUMBERS = Numbers(8)


@pytest.mark.parametrize(("loader", "message"), [
    ([1, 2], "a list .* torch DataLoader .* ff.Feed"),
    (data.DataLoader(Stream(), 2), "IterableDataset .* ff.world"),
    (data.DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]), "batch sampler .list. .* batch_size"),
    (data.DataLoader(NUMBERS, sampler=data.WeightedRandomSampler([1.0] * 8, 8)), "WeightedRandomSampler.* once"),
    (data.DataLoader(NUMBERS, sampler=data.RandomSampler(NUMBERS, replacement=True)), "RandomSampler.* once"),
    (data.DataLoader(NUMBERS, sampler=data.RandomSampler(NUMBERS, num_samples=4)), "RandomSampler.* once"),
    (data.DataLoader(NUMBERS, sampler=data.SubsetRandomSampler([1])), "SubsetRandomSampler.*data.Subset"),
    (data.DataLoader(NUMBERS, sampler=data.DistributedSampler(NUMBERS, 2, 0)), "sharded already"),
    (sharded(data.DataLoader(NUMBERS, 2), 2, 0), "sharded already"),
    (OwnLoader(NUMBERS, 2), "OwnLoader.* overrides __iter__"),
    (data.DataLoader(Numbers(1), 2), "1 samples for 2 data ranks .* at least 2"),
    (data.DataLoader(Numbers(7), 4, drop_last=True), "7 samples for 2 data ranks .* at least 8.* drop_last=False"),
])  # fmt: skip
def test_a_loader_that_cannot_be_sharded_by_index_is_refused(loader, message):
    with pytest.raises(DataError, match=message):
        sharded(loader, 2, 0)


class Endless(data.Dataset):
    """A dataset without a length."""

    def __getitem__(self, index):
        return torch.tensor(float(index))


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(DataError, match=r"without a length \(Endless\)"):
        sharded(data.DataLoader(Endless(), 2), 2, 0)


@pytest.mark.parametrize(("options", "message"), [
    ({"seed": "0"}, "seed = '0' .* a whole number"),
    ({"seed": 1.5}, "seed = 1.5 .* a whole number"),
    ({"plan": 2}, "plan = 2 .* a Plan"),
    ({"plan": Plan(dp=4)}, "a plan of 4 ranks in a world of 2"),
    ({"plan": Plan()}, "a plan of 1 ranks in a world of 2"),
])  # fmt: skip
def test_an_invalid_seed_or_plan_is_refused(options, message, monkeypatch):
    """A plan of more ranks than the world has would drop the samples of the missing ranks."""
    with pytest.raises(DataError, match=message):
        sharded(data.DataLoader(NUMBERS, 2), 2, 1, **options)
    monkeypatch.setattr(init, "world", lambda: World(rank=1, size=2))
    with pytest.raises(DataError, match=message):
        ff.Feed(NUMBERS, batch_size=2, **options)


@pytest.mark.parametrize("epoch", ["1", 1.0, -1, None])
def test_an_epoch_is_a_nonnegative_integer(epoch):
    loader = sharded(data.DataLoader(NUMBERS, 2, shuffle=True), 2, 0)
    assert isinstance(loader.sampler, ShardSampler)
    with pytest.raises(DataError, match=r"epoch = .* a whole number of at least 0"):
        loader.sampler.set_epoch(epoch)


def test_a_sharded_loader_trains_where_the_unsharded_one_is_refused():
    samples = data.TensorDataset(torch.arange(64.0).view(32, 2))

    def body(comm):
        model = torch.nn.Linear(2, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5), model, communicator=comm)
        for (x,) in loaders[comm.rank]:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return optimizer._steps.num_steps

    unsharded = data.DataLoader(samples, 4, generator=torch.Generator())
    loaders = [unsharded, unsharded]
    with pytest.raises(ff.FourfoldError, match=r"ff\.shard\(loader\)"):
        threads.run(2, body)
    loaders = [sharded(unsharded, 2, rank) for rank in range(2)]
    assert threads.run(2, body) == [4, 4]


@given(length=st.integers(5, 60), size=st.integers(1, 5), part=st.integers(1, 4), drop_last=st.booleans())
def test_split_batches_are_those_of_the_loader(length, size, part, drop_last):
    loader = data.DataLoader(Numbers(length), part * size, drop_last=drop_last)
    if length < size * part and drop_last:
        with pytest.raises(DataError, match=f"{length} samples for {size} data ranks"):
            sharded(loader, size, 0, split_batches=True)
        return
    by_rank = [epochs(sharded(loader, size, rank, split_batches=True))[0] for rank in range(size)]
    together = [sorted({number for part in step for number in part}) for step in zip(*by_rank, strict=True)]
    assert together == epochs(loader)[0]


REFUSED_SPLITS = [
    ({"batch_size": 6}, r"batch_size = 6, to be split among 4 data ranks .*a multiple of 4 .*batch_size=4 or 8"),
    ({"batch_size": 3}, r"batch_size = 3, .*try batch_size=4"),
    ({"batch_size": None}, r"a loader without batches"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED_SPLITS)
def test_batches_that_cannot_be_split_evenly_are_refused(options, message):
    loader = data.DataLoader(Numbers(24), **options)
    with pytest.raises(DataError, match=message):
        sharded(loader, 4, 0, split_batches=True)
    assert sharded(loader, 1, 0, split_batches=True).batch_size == options["batch_size"]
