"""Laws of data sources: one source for all ranks, or an error on every rank before a weight changes."""

import functools

import pytest
import torch

import fourfold as ff
from fourfold.feed.feed import Feed
from fourfold.feed.sample_rng import fingerprint_of, is_same_sample
from fourfold.feed.source import TensorSource
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.trainer.evaluate import evaluate
from fourfold.words.errors import TaskError

INPUTS = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.square().sum(1, keepdim=True)


def values(outputs, targets):
    return (outputs - targets).square()


def build(comm, **plan):
    model = torch.nn.Linear(3, 1).double()
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    return TrainStep(model, values, sgd, plan=ff.Plan(dp=comm.size, **plan), communicator=comm, clip=None)


def trained(size, source, *, hosts=1):
    """The error of each rank after an epoch of `source(rank)`."""

    def body(comm):
        step, feed = build(comm), Feed(source(comm.rank), batch_size=8)
        feed._size, feed._index = comm.size, comm.rank  # threads are ranks here
        (weight, _) = step.model.parameters()
        before = weight.detach().clone()
        try:
            for batch in feed:
                step(batch)
        except TaskError as error:
            assert torch.equal(weight, before)
            return str(error)
        return "trained"

    return threads.run(size, body, hosts=hosts)


def part(rank, size=2):
    return TensorSource(INPUTS[rank::size], TARGETS[rank::size])


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    "source", [part, lambda rank: [part(rank)[index] for index in range(20)]], ids=["fetch", "samples"]
)
def test_a_different_source_on_each_rank_is_refused_on_every_rank(source, hosts):
    for message in trained(2, source, hosts=hosts):
        assert "another source on rank 1 than on rank 0" in message
        assert "need the same source on every rank" in message


def test_one_source_is_trained_also_where_processors_round_differently():
    assert trained(2, lambda rank: TensorSource(INPUTS, TARGETS)) == ["trained"] * 2
    assert trained(3, lambda rank: TensorSource(INPUTS * (1 + 1e-6 * rank), TARGETS)) == ["trained"] * 3


class RandomSamples:
    """Samples that change with each read, from each rank's own generator."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(3, dtype=torch.float64, generator=self.generator), torch.zeros(1, dtype=torch.float64)


def test_samples_that_change_with_each_read_are_not_compared():
    assert trained(2, RandomSamples) == ["trained"] * 2


@pytest.mark.parametrize("zero", [0, 3])
def test_validation_data_of_different_lengths_are_refused_on_every_rank(zero):
    def body(comm):
        step = build(comm, zero=zero)
        sgd = functools.partial(torch.optim.SGD, lr=0.01)
        data = ff.Data(train=part(0))
        task = ff.Task(model=lambda: step.model, loss=values, data=lambda: data, optimizer=sgd)
        source = TensorSource(INPUTS[: 9 + 4 * comm.rank], TARGETS[: 9 + 4 * comm.rank])
        with pytest.raises(TaskError, match="validation data: rank 0 has 9 samples; rank 1 has 13 samples"):
            evaluate(step, task, source, 4)
        return True

    assert threads.run(2, body, hosts=2) == [True, True]


def test_a_fingerprint_distinguishes_samples_by_shape_and_by_value():
    ones = {"x": torch.ones(1, 500), "y": (torch.tensor([3]), torch.tensor([1j]))}
    fingerprint = fingerprint_of(ones)
    assert is_same_sample(fingerprint, fingerprint_of(dict(reversed(ones.items()))))
    for other in (
        {**ones, "x": torch.ones(1, 501)},
        {**ones, "x": torch.ones(1, 500) * 1.01},
        {**ones, "y": (torch.tensor([4]), torch.tensor([1j]))},
        {**ones, "y": (torch.tensor([3]), torch.tensor([-1j]))},
        {**ones, "x": torch.full((1, 500), torch.nan)},
        {"x": ones["x"]},
    ):
        assert not is_same_sample(fingerprint, fingerprint_of(other))
    empty = {"x": torch.ones(1, 0), "nan": torch.tensor([torch.nan, torch.inf])}
    assert is_same_sample(fingerprint_of(empty), fingerprint_of(empty))
