"""Laws of the data axis. Ranks are threads."""

import dataclasses
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fourfold.optim.user_optimizer import ELEMENTWISE
from fourfold.plan.plan import Plan
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError, TrainingError
from fourfold.words.program import Verb
from tests.cases import LOSSES, Case, batches, build_step, deviation, local_batch, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")


@pytest.mark.parametrize("kind", [cls.__name__ for cls in ELEMENTWISE])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_flat_update_equals_the_update_of_each_parameter(kind, zero):
    case = Case(optimizer=kind, batch_sizes=(8, 8, 8, 8), bucket_bytes=1500, zero=zero)
    assert max(threads.run(3, lambda comm: deviation(case, 3, comm))) <= TOLERANCE


@pytest.mark.covering
@pytest.mark.parametrize("kind", [cls.__name__ for cls in ELEMENTWISE])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_parameter_whose_first_gradient_comes_in_a_later_step_is_trained(kind, zero):
    # The spare layer is used for even numbers of samples, so first in the third step.
    case = Case(model="sometimes", unused="allow", optimizer=kind, batch_sizes=(9, 9, 6, 9, 6), zero=zero)
    assert max(threads.run(3, lambda comm: deviation(case, 3, comm))) <= TOLERANCE


@pytest.mark.parametrize(("zero", "microbatches"), [(0, 1), (0, 2), (1, 1), (2, 2)])
def test_a_parameter_without_gradient_is_named(zero, microbatches):
    case = Case(model="unused", zero=zero, microbatches=microbatches)
    with pytest.raises(TrainingError, match=r"spare\.weight got no gradient") as caught:
        threads.run(2, lambda comm: train_step(case, build_step(case, 2, comm)))
    assert "spare.bias" in str(caught.value)


@pytest.mark.parametrize("zero", [1, 2])
def test_updates_in_backward_do_not_wait_for_a_rank_without_samples(zero):
    """It may itself wait for gradients of buckets that the others have not reached."""
    fields = {"zero": zero, "update": "in_backward", "transport": "gloo", "batch_sizes": (6, 1, 4)}
    case = Case(model="lm", length=8, **fields)
    assert max(threads.run(2, lambda comm: deviation(case, 2, comm))) <= TOLERANCE


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_parameter_without_gradient_on_some_ranks_is_trained_by_the_others(microbatches, zero):
    # The spare layer is used for even microbatches only: on some ranks, in some steps, it has no gradient.
    case = Case(model="sometimes", unused="allow", microbatches=microbatches, zero=zero)
    assert max(threads.run(3, lambda comm: deviation(case, 3, comm))) <= TOLERANCE


def test_a_layer_used_on_one_rank_only_is_trained_on_every_rank(monkeypatch):
    # Rank 0 gets 2 samples, rank 1 gets 3: their buckets are completed in different orders.
    case = Case(model="sometimes", unused="allow", batch_sizes=(5, 5), bucket_bytes=300)

    def body(comm):
        step = build_step(case, 2, comm)
        launched: list[int] = []
        grads = step._parts.stage.reducer
        launch = grads.reduce_async
        monkeypatch.setattr(
            grads, "reduce_async", lambda bucket, *args: launched.append(bucket) or launch(bucket, *args)
        )
        before = step.model.get_parameter("spare.weight").clone()
        trained = train_step(case, step)
        assert not torch.equal(before, trained.weights["spare.weight"])
        return {name: weight.tolist() for name, weight in trained.weights.items()}, launched

    first, second = threads.run(2, body)
    assert first == second


@pytest.mark.parametrize(("bucket_bytes", "loaded_bucket_bytes"), [(2**20, 300), (300, 2**20), (4000, 4000)])
@pytest.mark.parametrize(("zero", "loaded_zero"), [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_a_state_dict_loads_on_another_mesh_and_other_buckets(bucket_bytes, loaded_bucket_bytes, zero, loaded_zero):
    case = Case(batch_sizes=(12, 12, 12, 12), clip=0.5, model="tied", bucket_bytes=bucket_bytes, zero=zero)

    def begin(comm):
        step = build_step(case, 3, comm)
        for number, batch in enumerate(batches(case)[:2]):
            if number == 1:
                step.optimizer.param_groups[0]["lr"] = 0.02
            step(local_batch(batch, 3, step.dp_index))
        return step.state_dict()

    state = threads.run(3, begin)[0]

    def resume(comm):
        step = build_step(dataclasses.replace(case, bucket_bytes=loaded_bucket_bytes, zero=loaded_zero), 2, comm)
        step.load_state_dict(state)
        return train_step(case, step, skip=2)

    def train_uninterrupted(comm):
        step = build_step(case, 1, comm)
        for number, batch in enumerate(batches(case)):
            if number == 1:
                step.optimizer.param_groups[0]["lr"] = 0.02
            step(batch)
        return dict(step.model.named_parameters())

    (expected,) = threads.run(1, train_uninterrupted)
    for trained in threads.run(2, resume):
        for name, weight in expected.items():
            torch.testing.assert_close(trained.weights[name], weight.detach(), rtol=0, atol=TOLERANCE)


def test_more_buckets_are_used_between_hosts_and_with_a_codec(monkeypatch):
    def num_buckets(hosts, **fields):
        case = Case(bucket_bytes=2**20, **fields)
        return len(threads.run(2, lambda comm: build_step(case, 2, comm).buckets, hosts=hosts)[0])

    def wrapped(comm):
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return DistributedOptimizer(optimizer, model, communicator=comm)._averager.num_buckets

    monkeypatch.setattr("fourfold.axes.data.rules.buckets.MIN_INTER_HOST_BUCKET_BYTES", 1)
    assert num_buckets(1) < num_buckets(1, codec="int8") == num_buckets(2) == num_buckets(2, codec="int8")
    assert [threads.run(2, wrapped, hosts=hosts) for hosts in (1, 2)] == [[1, 1], [8, 8]]


def test_the_launch_order_is_frozen_after_the_first_step_and_the_same_on_every_rank():
    case = Case(bucket_bytes=1000)

    def body(comm):
        step = build_step(case, 2, comm)
        train_step(case, step)
        return [str(action) for action in step.program]

    first, second = threads.run(2, body)
    assert first == second
    assert sorted(a for a in first if a[0] == "R") == sorted("R" + a[1:] for a in first if a[0] == "U")


def test_after_the_first_step_buckets_are_launched_in_the_recorded_order(monkeypatch):
    # Rank 0 gets 3 samples and never uses the spare layer, whose buckets have the lowest numbers: they come last.
    case = Case(model="sometimes", unused="allow", batch_sizes=(7, 7), bucket_bytes=300)

    def body(comm):
        step = build_step(case, 2, comm)
        train_step(dataclasses.replace(case, batch_sizes=(7,)), step)
        launched: list[int] = []
        grads = step._parts.stage.reducer
        launch = grads.reduce_async
        monkeypatch.setattr(
            grads, "reduce_async", lambda bucket, *args: launched.append(bucket) or launch(bucket, *args)
        )
        train_step(case, step, skip=1)
        return launched, [action.index for action in step.program if action.verb == Verb.REDUCE]

    for launched, recorded in threads.run(2, body):
        assert launched == recorded != sorted(recorded)


def test_two_gradients_of_a_parameter_in_one_backward_are_refused():
    # A reentrant checkpoint runs a separate backward for each use of the layer.
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 10)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
            return self.head(x)

    def body(comm):
        step = TrainStep(Twice(), LOSSES["values"], torch.optim.SGD, plan=Plan(dp=2), communicator=comm, clip=None)
        step((torch.ones(2, 16), torch.zeros(2, dtype=torch.int64)))

    with pytest.raises(TaskError, match=r"two gradients of layer\.\w+ in one backward"):
        threads.run(2, body)


class Weighed(torch.nn.Module):
    """The gradient of every element is its input."""

    def __init__(self, dtype):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(300, dtype=dtype) for _ in range(3))

    def forward(self, x):
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_two_byte_gradients_is_neither_rounded_nor_infinite(zero, dtype):
    each = torch.tensor(9000.0, dtype=dtype)

    def body(comm):
        plan, sgd = Plan(dp=2, zero=zero, bucket_bytes=1), functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(Weighed(dtype), lambda out, _: (out, 1), sgd, plan=plan, communicator=comm, clip=1.0)
        return step((each.view(1), torch.zeros(1))).grad_norm

    assert threads.run(2, body) == [pytest.approx(each.item() * 900**0.5, rel=1e-6)] * 2


def test_stale_data_in_a_reused_slot_is_not_part_of_the_norm():
    case = Case(zero=2, clip=0.05, bucket_bytes=1, batch_sizes=(12, 12))
    assert max(threads.run(2, lambda comm: deviation(case, 2, comm))) <= TOLERANCE
