"""Laws of a feed: resuming from its state, and random numbers in its samples."""

import io
import itertools
import json
import random
import threading

import numpy as np
import pytest
import torch

import fourfold as ff
from fourfold.comm import init
from fourfold.environment.world import World
from fourfold.feed.position import Position
from fourfold.orders.sample_order import BatchRange
from fourfold.verification.command import verify
from fourfold.words.errors import DataError


def numbers(length):
    return [(torch.tensor(float(number)), number) for number in range(length)]


def fed(length=20, *, batch_size=4, seed=0):
    return ff.Feed(numbers(length), batch_size=batch_size, seed=seed)


def targets(feed, count=None):
    result = []
    for batch in feed:
        result.append(batch[1].tolist())
        if len(result) == count:
            break
    return result


def through_json(state):
    return json.loads(json.dumps(state))


def through_torch(state):
    file = io.BytesIO()
    torch.save({"feed": state}, file)
    file.seek(0)
    return torch.load(file)["feed"]  # with weights_only, torch's default


@pytest.mark.parametrize("saved", [lambda state: state, tuple, through_json, through_torch, lambda state: state[:3]])
def test_a_saved_state_in_any_form_resumes_with_its_own_seed(saved):
    uninterrupted, first, second = fed(seed=3), fed(seed=3), fed(seed=5)
    expected = targets(uninterrupted) + targets(uninterrupted)
    first_batches = targets(first, 2)
    second.load_state(saved(first.state))
    assert first_batches + targets(second) + targets(second) == expected
    assert second.state == Position(3, 2, 0, 20)


def test_a_state_resumes_with_another_batch_size():
    first, second = fed(), fed(batch_size=3)
    first_batches = targets(first, 2)
    second.load_state(first.state)
    assert sorted(itertools.chain(*first_batches, *targets(second))) == list(range(20))


def test_a_mid_epoch_state_of_another_source_length_is_refused_and_changes_nothing():
    first, second = fed(20), fed(24)
    targets(first, 2)
    with pytest.raises(DataError, match=r"position 8 in an epoch of 20 samples, and a source of 24 now .* \(0, 1, 0\)"):
        second.load_state(first.state)
    assert second.state == Position(0, 0, 0, 24)
    targets(first)
    second.load_state(first.state)  # between epochs
    assert sorted(itertools.chain(*targets(second))) == list(range(24))


def test_a_source_that_grows_within_an_epoch_is_refused_when_the_loop_continues():
    source = numbers(20)
    feed = ff.Feed(source, batch_size=4)
    targets(feed, 2)
    source += numbers(4)
    with pytest.raises(DataError, match="position 8 in an epoch of 20 samples, and a source of 24 now"):
        targets(feed)


@pytest.mark.parametrize(("state", "message"), [
    ((0, -1, 4, 20), "epoch = -1"),
    ((2**64, 0, 4, 20), "seed = 18446744073709551616"),
    ((0, 0, -1, 20), "position -1"),
    ((0, 0, 20, 20), "position 20"),
    ((0, 0, 4.0, 20), "a state"),
    ((0, 0, 4, 20, 1), "a state"),
    ((0, 0), "a state"),
    (None, "a state None"),
    ("abc", "a state 'abc'"),
])  # fmt: skip
def test_an_invalid_state_is_refused(state, message):
    with pytest.raises(DataError, match=message):
        fed().load_state(state)


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def drawn():
    return torch.rand(()).item(), random.random(), np.random.rand()


class Augmented:
    """Samples that draw from all generators of the process."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(drawn(), dtype=torch.float64), index


def samples_of(feed, epochs=1):
    """The random numbers of each sample, by epoch and index."""
    result = {}
    for epoch in range(epochs):
        for inputs, numbers_ in feed:
            for row, number in zip(inputs, numbers_, strict=True):
                result[epoch, number.item()] = row.tolist()
            drawn()  # training draws random numbers too
    return result


def samples_on_ranks(size, monkeypatch, **how):
    result = {}
    for rank in range(size):
        monkeypatch.setattr(init, "world", lambda rank=rank: World(rank=rank, size=size))
        seed_all(rank)
        result |= samples_of(ff.Feed(Augmented(), **how), epochs=2)
    return result


def test_random_samples_are_the_same_on_any_mesh_and_batch_size_and_differ_between_epochs(monkeypatch):
    on_one_rank = samples_on_ranks(1, monkeypatch, batch_size=4)
    assert on_one_rank.keys() == {(epoch, number) for epoch in range(2) for number in range(12)}
    assert len({str(row) for row in on_one_rank.values()}) == 24
    assert samples_on_ranks(3, monkeypatch, batch_size=4) == on_one_rank
    assert samples_on_ranks(2, monkeypatch, batch_size=6) == on_one_rank
    other = samples_on_ranks(1, monkeypatch, batch_size=4, seed=1)
    assert not {str(row) for row in other.values()} & {str(row) for row in on_one_rank.values()}


def test_random_samples_are_the_same_after_a_resume():
    uninterrupted = samples_of(ff.Feed(Augmented(), batch_size=4))
    first, second = ff.Feed(Augmented(), batch_size=4), ff.Feed(Augmented(), batch_size=4)
    inputs, which = next(iter(first))
    second.load_state(first.state)
    first_batches = {(0, number.item()): row.tolist() for row, number in zip(inputs, which, strict=True)}
    assert first_batches | samples_of(second) == uninterrupted


class Deterministic(Augmented):
    """Samples that draw no random numbers."""

    def __getitem__(self, index):
        return torch.zeros(3), index


def test_random_samples_do_not_advance_the_generators_of_training():
    result = []
    for source in (Deterministic(), Augmented()):
        seed_all(0)
        loop = ff.Feed(source, batch_size=2).repeat()
        result.append([drawn() for _ in itertools.islice(loop, 20)])
        loop.close()
    assert result[0] == result[1]


class CountingSource:
    """Releases a semaphore with every sample that is read. With `draws`, samples draw random numbers."""

    def __init__(self, *, draws):
        self.draws, self.read = draws, threading.Semaphore(0)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if self.draws:
            torch.rand(())
        self.read.release()
        return torch.zeros(1), index


@pytest.mark.parametrize("draws", [False, True])
def test_only_samples_without_random_numbers_are_prefetched(draws):
    source = CountingSource(draws=draws)
    loop = iter(ff.Feed(source, batch_size=1))
    next(loop)
    for _ in range(2 if draws else 1):  # if the first sample draws random numbers, it is read twice
        assert source.read.acquire(timeout=10)
    for _ in range(3):
        assert source.read.acquire(timeout=0.2) != draws
        if draws:
            next(loop)
            assert source.read.acquire(timeout=10)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("number", [0, 5])
def test_an_error_of_the_source_is_raised_at_its_own_batch(number, draws):
    class Failing(CountingSource):
        def __getitem__(self, index):
            if index == bad:
                raise KeyError("gone")
            return super().__getitem__(index)

    source = Failing(draws=draws)
    bad = BatchRange(32, 0, 0, 0, 32, 0, 32).sample_ids()[number]
    feed, state = ff.Feed(source, batch_size=1), torch.get_rng_state()
    with pytest.raises(KeyError, match="gone"):
        list(feed)
    assert feed.state.position == number
    assert torch.equal(torch.get_rng_state(), state)


class Interrupted(Exception):
    """Stops a run midway."""


def interrupted(step, _):
    if step == 5:
        raise Interrupted
    return 1.0


def augmented(folder, name, **how):
    """A run whose training samples, validation samples and model all draw random numbers."""
    task = ff.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).double(),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square(),
        data=lambda: ff.Data(train=Augmented(), valid=Augmented()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        schedule=how.pop("schedule", None),
        steps=7,
        batch_size=5,
    )
    result = ff.train(task, ff.Plan(), folder=str(folder), name=name, checkpoint_every=2, **how)
    return result.loss, result.valid


def test_a_run_with_random_samples_does_not_depend_on_resumes_or_evaluations(tmp_path):
    uninterrupted = augmented(tmp_path, "uninterrupted")
    assert augmented(tmp_path, "often", evaluate_every=1) == uninterrupted
    with pytest.raises(Interrupted):
        augmented(tmp_path, "resumed", schedule=interrupted)
    seed_all(5)
    assert augmented(tmp_path, "resumed") == uninterrupted


def test_verify_supports_random_samples():
    task = ff.Task(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square(),
        data=lambda: ff.Data(train=Augmented()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        steps=4,
        batch_size=5,
    )
    verdict = verify(task, ff.Plan(microbatches=5))
    assert verdict is not None
    assert verdict.max_deviation < 1e-12
    assert not verdict.randomness
