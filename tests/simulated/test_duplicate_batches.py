"""Laws of data ranks with the same batches: refused, unless one batch is repeated, or the user allows it."""

import contextlib
import copy
import io
import warnings

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.feed.batches import Batch
from fourfold.orders.sample_order import BatchRange
from fourfold.proof.digests import batches as duplicate_batches
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.words.errors import FourfoldError, PlanError, SettingError, TaskError
from tests.cases import Case
from tests.cases import batches as global_batches
from tests.cases import build_step as build_case

REPEATED = "on one batch again"


def loader_batch(number, *, samples=4):
    """Batch `number` of an endless loader."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator)


class Parallel:
    """A rank that trains with `parallelize`."""

    def __init__(self, comm, model, **options):
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        plan = options.pop("plan", None) or ff.Plan(dp=comm.size)
        self.step = TrainStep(
            model, lambda y, t: (y - t).square(), sgd, plan=plan, communicator=comm, clip=None, **options
        )

    def train(self, batch):
        self.step(batch)


class Wrapped:
    """A rank that trains with `DistributedOptimizer`."""

    def __init__(self, comm, model, **options):
        self.model = model
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        self.optimizer = DistributedOptimizer(inner, model, options.pop("plan", None), communicator=comm, **options)

    def train(self, batch):
        inputs, targets = batch
        self.optimizer.zero_grad()
        if len(inputs):
            (self.model(inputs) - targets).square().mean().backward()
        else:
            (self.model(inputs).sum() * 0.0).backward()
        self.optimizer.step()


APIS = [Parallel, Wrapped]


def linear():
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def trained(api, size, batches, *, hosts=1, **options):
    """How many batches each rank trained on, and the error that stopped it. `batches(rank)` are a rank's batches."""

    def body(comm):
        model = linear()
        rank = api(comm, model, **options)
        count, error = 0, None
        for batch in batches(comm.rank):
            before = copy.deepcopy(model.state_dict())
            try:
                rank.train(batch)
            except TaskError as caught:
                error = str(caught)
                assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
                break
            count += 1
        return count, error

    return threads.run(size, body, hosts=hosts)


@pytest.mark.covering
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [0, 0, 1, 0, 2, 3], [5, 5, 5, 5, 6, 7, 8]])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_third_distinct_batch_common_to_all_data_ranks_is_refused_on_every_rank(api, numbers, hosts):
    found = trained(api, 3, lambda rank: map(loader_batch, numbers), hosts=hosts)
    third = next(place for place in range(len(numbers)) if len(set(numbers[: place + 1])) == 3)
    for count, error in found:
        assert count == third
        assert "the same batches on all 3 data ranks" in error
        assert "ff.Feed" in error
        assert "ff.shard(loader)" in error
        assert 'same_batches="allow"' in error


@pytest.mark.parametrize("api", APIS)
def test_refusals_repeat_until_the_ranks_batches_differ(api):
    def body(comm):
        rank = api(comm, linear())
        for number in (0, 1):
            rank.train(loader_batch(number))
        for number in (2, 3):
            with pytest.raises(TaskError, match="the same batches"):
                rank.train(loader_batch(number))
        rank.train(loader_batch(10 + comm.rank))
        for number in range(20, 24):
            rank.train(loader_batch(number))
        return True

    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize("api", APIS)
def test_a_repeated_batch_warns_once_and_is_trained_on(api):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trained(api, 2, lambda rank: [loader_batch(0)] * 6) == [(6, None)] * 2
    assert sum(REPEATED in str(each.message) for each in caught) == 1


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("last", [0, 1, 2])
def test_comparison_stops_once_batches_have_differed(api, last, monkeypatch):
    """Ranks differ in the first batch, or later; on all ranks, or on one of three."""
    hashed, hash_ = [], duplicate_batches.tensors_digest
    monkeypatch.setattr(duplicate_batches, "tensors_digest", lambda tensors: hashed.append(1) or hash_(tensors))

    def batches(rank):
        return [loader_batch(0)] * last + [loader_batch(1 if rank < 2 else 2)] + [loader_batch(n) for n in range(3, 9)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trained(api, 3, batches) == [(last + 7, None)] * 3
    assert len(hashed) == 3 * (last + 1)


@pytest.mark.parametrize("api", APIS)
def test_same_batches_can_be_allowed_and_are_then_not_hashed(api, monkeypatch):
    monkeypatch.setattr(duplicate_batches, "tensors_digest", None)
    assert trained(api, 2, lambda rank: map(loader_batch, range(5)), same_batches="allow") == [(5, None)] * 2


@pytest.mark.parametrize("api", APIS)
def test_one_rank_hashes_no_batches(api, monkeypatch):
    monkeypatch.setattr(duplicate_batches, "tensors_digest", None)
    assert trained(api, 1, lambda rank: map(loader_batch, range(5))) == [(5, None)]


def test_a_wrapper_that_a_newer_one_replaces_hashes_no_batches(monkeypatch):
    def body(comm):
        older, newer = Wrapped(comm, model := linear()), Wrapped(comm, model)
        newer.train(loader_batch(comm.rank))
        return older.optimizer is not newer.optimizer

    hashed, hash_ = [], duplicate_batches.tensors_digest
    monkeypatch.setattr(duplicate_batches, "tensors_digest", lambda tensors: hashed.append(1) or hash_(tensors))
    assert threads.run(2, body) == [True, True]
    assert len(hashed) == 2  # one on each rank


@pytest.mark.parametrize("api", APIS)
def test_empty_batches_are_not_compared(api):
    """Two ranks have the same samples and the third has none: refused. Only one rank has samples: trained."""
    some = lambda rank: [loader_batch(n, samples=4 if rank < 2 else 0) for n in range(5)]  # noqa: E731
    plan = ff.Plan(dp=3, unused="allow")
    assert [count for count, _ in trained(api, 3, some, plan=plan)] == [2, 2, 2]
    one = lambda rank: [loader_batch(n, samples=4 if rank == n % 3 else 0) for n in range(5)]  # noqa: E731
    assert [count for count, _ in trained(api, 3, one, plan=plan)] == [5, 5, 5]


@pytest.mark.parametrize("api", APIS)
def test_comparison_ends_after_max_compared_batches(api, monkeypatch):
    monkeypatch.setattr(duplicate_batches, "MAX_COMPARED", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trained(api, 2, lambda rank: [loader_batch(0)] * 4 + [loader_batch(n) for n in range(1, 6)])
    assert found == [(9, None)] * 2


@pytest.mark.parametrize("api", APIS)
def test_same_batches_has_two_values_and_is_the_same_on_every_rank(api):
    def unknown(comm):
        with pytest.raises(SettingError, match='same_batches = "yes"'):
            api(comm, linear(), same_batches="yes")
        return True

    def mismatched(comm):
        with pytest.raises(PlanError, match="same_batches"):
            api(comm, linear(), same_batches="allow" if comm.rank else "error")
        return True

    assert threads.run(2, unknown) == threads.run(2, mismatched) == [True, True]


def test_batches_of_a_feed_are_not_compared(monkeypatch):
    monkeypatch.setattr(duplicate_batches, "tensors_digest", None)
    fed = [Batch.wrap(loader_batch(n), BatchRange(99, 0, 0, 4 * n, 4 * n + 4, 4 * n, 4 * n + 4)) for n in range(5)]
    assert trained(Parallel, 2, lambda rank: fed) == [(5, None)] * 2


def test_a_feed_batch_on_one_rank_and_a_loader_batch_on_another_do_not_deadlock():
    def body(comm):
        rank = Parallel(comm, linear())
        batch = loader_batch(0)
        fed = Batch.wrap(batch, BatchRange(99, 0, 0, 0, 4, 0, 4))
        with pytest.raises(FourfoldError, match="step 1, positions 0 to 4"):
            rank.train(fed if comm.rank else batch)
        return True

    for hosts in (1, 2):
        assert threads.run(2, body, hosts=hosts) == [True, True]


@pytest.mark.parametrize("dp", [1, 2])
def test_batches_are_compared_between_data_ranks_and_not_within_a_context_group(dp):
    case = Case(model="lm", batch_sizes=(4,) * 4, cp=2)

    def body(comm):
        step = build_case(case, 2 * dp, comm)
        first, second, *rest = global_batches(case)  # the same on all ranks
        step(first)
        step(second)
        for batch in rest:
            refused = pytest.raises(TaskError, match="all 2 data ranks")
            with refused if dp == 2 else contextlib.nullcontext():
                step(batch)
        return step.num_steps

    assert threads.run(2 * dp, body) == [4 if dp == 1 else 2] * 2 * dp


def test_ranks_of_a_sequence_group_count_as_one_data_rank():
    """Only the first of two data ranks has samples: its two ranks (cp = 2) have one batch, the others none."""
    case = Case(model="lm", batch_sizes=(4,) * 4, cp=2)

    def body(comm):
        step = build_case(case, 4, comm)
        for batch in global_batches(case):
            step(tree_map(batch, lambda tensor: tensor[: 0 if step.dp_index else 4]))
        return step.num_steps

    assert threads.run(4, body) == [4] * 4


def test_several_forwards_before_a_backward_are_one_batch():
    def body(comm):
        model = linear()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=comm)
        for step in range(3):
            with optimizer.no_sync():
                model(loader_batch(2 * step)[0]).sum().backward()
            if step < 2:
                model(loader_batch(2 * step + 1)[0]).sum().backward()
        with pytest.raises(TaskError, match="the same batches"):
            model(loader_batch(5)[0]).sum().backward()
        return True

    assert threads.run(2, body) == [True, True]


def test_only_training_batches_are_compared():
    """Evaluation batches are not compared, with or without autograd, nor are inputs that are not per sample."""

    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x, *, step, scale):
            return self.layer(x) * scale + step

    def body(comm):
        model = Scheduled()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=comm)
        for step in range(6):
            model.eval()
            model(loader_batch(step)[0], step=step, scale=torch.tensor(2.0))
            model.train()
            with torch.no_grad():
                model(loader_batch(step)[0], step=step, scale=torch.tensor(2.0))
            model(torch.ones(2, 3), step=step, scale=torch.tensor(float(step))).sum().backward()
        return len(optimizer.state) == 0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert threads.run(2, body) == [True, True]
    assert sum(REPEATED in str(each.message) for each in caught) == 1


def test_within_join_only_ranks_with_data_are_compared():
    def body(comm):
        model = linear()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=comm)

        def train():
            with optimizer.join():
                for number in range(0 if comm.rank == 2 else 5):
                    model(loader_batch(number)[0]).sum().backward()
                    optimizer.step()

        with pytest.raises(TaskError, match="the same batches"):
            train()
        return optimizer._steps.num_steps

    assert threads.run(3, body) == [2, 2, 0]


def test_copies_and_saved_files_of_an_observed_model_are_not_observed():
    def body(comm):
        model = linear()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=comm)
        copies = [copy.deepcopy(model)]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        for number in range(5):
            for other in copies:
                other(loader_batch(number)[0]).sum().backward()
            model(loader_batch(10 * comm.rank + number)[0]).sum().backward()
            optimizer.step()
        return len(model._forward_pre_hooks)

    assert threads.run(2, body) == [0, 0]


class Opaque:
    """An object that cannot be hashed."""


@pytest.mark.parametrize("tree", [
    Opaque(), {"x": torch.ones(2), "cache": Opaque()}, torch.empty(0, 3), torch.ones(()), 3, None, (), {"mask": None},
    torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse(),
])  # fmt: skip
def test_inputs_that_cannot_be_compared_have_no_fingerprint(tree):
    assert duplicate_batches.samples_digest(tree) is None


def test_fingerprints_differ_where_batches_do():
    x = torch.arange(6.0).view(2, 3)
    trees = [
        x, x.t(), x.double(), x + 1, (x, x), {"a": x}, {"b": x}, [x, 2 * x], ["some text"], ["another text"],
        x.to(torch.complex64), x > 2, x.bfloat16(), x.numpy() + 5, [b"some bytes"],
    ]  # fmt: skip
    prints = [duplicate_batches.samples_digest(tree) for tree in trees]
    assert None not in prints
    assert len(set(prints)) == len(trees)
    assert duplicate_batches.samples_digest((x, 1)) == duplicate_batches.samples_digest((x.clone(), 2))
    assert duplicate_batches.samples_digest(x.t().contiguous().t()) == duplicate_batches.samples_digest(x)


def test_removing_the_input_hook_does_not_recompile_a_model():
    from torch._dynamo.testing import CompileCounter  # not on top: two seconds in each process that collects tests

    counter, model = CompileCounter(), linear()
    inputs = duplicate_batches.InputDigests(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for number in range(4):
        compiled(loader_batch(number)[0]).sum().backward()
        if number == 1:
            assert inputs.pop() is None
            inputs.remove_hook()
    assert counter.frame_count == 1
