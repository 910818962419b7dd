"""Laws of batch_norm = "sync" under a DistributedOptimizer: the user's own loop trains as on one device."""

import contextlib
import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fourfold.model.batch_statistics import SyncedInTraining
from fourfold.model.sync_batch_norm import StatisticsExchange
from fourfold.orders.sample_order import shard_range
from fourfold.plan.plan import Plan
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from fourfold.words.errors import DivergenceError, PlanError, TaskError, TrainingError
from tests.classification import loss, sgd
from tests.norm_cases import KINDS, Net, WithActivation, batches, buffers, images, net, resnet

TOLERANCE = 1e-12
# A reentrant checkpoint runs a backward within the backward, which a DistributedOptimizer refuses.
LOOP_KINDS = tuple(kind for kind in KINDS if kind != "reentrant")


def wrap(comm, model, optimizer: Any = sgd, **fields):
    plan = Plan(dp=comm.size, **{"batch_norm": "sync", **fields})
    return DistributedOptimizer(optimizer(model.parameters()), model, plan, communicator=comm, drift_check=1)


def part(batch, rank, size):
    start, stop = shard_range(0, len(batch[1]), size, rank)
    return batch[0][start:stop], batch[1][start:stop]


def run_loop(model, optimizer, given_batches, *, rank=0, size=1, accumulate=1):
    """A loop that mentions ranks only where it takes its samples. Returns its losses, and a state of the model."""
    losses = []
    for number, batch in enumerate(given_batches, 1):
        inputs, targets = part(batch, rank, size)
        is_last = number % accumulate == 0
        with contextlib.nullcontext() if is_last or size == 1 else optimizer.no_sync():
            value = loss(model(inputs), targets).sum() / len(batch[1])
            # The mean over the ranks is of the ranks' losses.
            (value * size / accumulate).backward()
        losses.append(value.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def check_equal(
    make, given_batches, *, size, accumulate=1, optimizer: Any = sgd, hosts=1, tolerance=TOLERANCE, **fields
):
    """Losses, weights and statistics are those of one device; statistics are the same on all ranks, bit for bit."""
    alone = make()
    expected_losses, expected = run_loop(alone, optimizer(alone.parameters()), given_batches, accumulate=accumulate)

    def body(comm):
        model = make()
        wrapped = wrap(comm, model, optimizer, **fields)
        return run_loop(model, wrapped, given_batches, rank=comm.rank, size=size, accumulate=accumulate)

    ranks = threads.run(size, body, hosts=hosts)
    losses = [sum(values) for values in zip(*(losses for losses, _ in ranks), strict=True)]
    assert losses == pytest.approx(expected_losses, abs=tolerance)
    for _, state in ranks:
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, ranks[0][1][name]), name
            torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    dims=st.sampled_from(range(4)),
    kind=st.sampled_from(LOOP_KINDS),
    size=st.integers(1, 4),
    sizes=st.lists(st.integers(2, 9), min_size=3, max_size=3),  # fewer than ranks: some have no sample
    accumulate=st.sampled_from([1, 2]),
    transport=st.sampled_from(["auto", "gloo"]),
    hosts=st.sampled_from([1, 2]),
    options=st.sampled_from(
        [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.7, "eps": 1e-2}]
    ),
    bucket_bytes=st.sampled_from([100, 4000]),
    adam=st.booleans(),
)
def test_a_loop_with_statistics_over_ranks_trains_as_on_one_device(
    dims, kind, size, sizes, accumulate, transport, hosts, options, bucket_bytes, adam
):
    if kind == "frozen weights" and options.get("affine") is False:
        options = {}
    make = functools.partial(net, kind, dims=dims, **options)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3) if adam else sgd
    plan = {"transport": transport, "bucket_bytes": bucket_bytes}
    given_batches = batches([9, *sizes], dims)
    check_equal(
        make, given_batches, size=size, accumulate=accumulate, optimizer=optimizer, hosts=min(hosts, size), **plan
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_without_samples_adds_nothing(size):
    check_equal(functools.partial(net, dims=2), batches([9, 1, 5], 2), size=size)


def test_a_stock_resnet_trains_as_on_one_device():
    make = functools.partial(resnet, "transformers")
    # Many norms behind each other, of few values a channel at the last ones, amplify rounding.
    check_equal(make, images(4, 3, width=24), size=2, tolerance=1e-9)


def test_torch_sync_batch_norm_and_subclasses_are_synced():
    def converted() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(net(dims=2))

    for make in (converted, functools.partial(net, dims=2, norm=WithActivation)):
        check_equal(make, batches([9, 4], 2), size=2)


class InParts(Net):
    """Its norms are called outside of its own forward."""

    def forward(self, x):
        raise AssertionError("the loop calls the parts")

    def __call__(self, x):
        return self.head(torch.tanh(self.other(self.mid(self.norm(self.first(x))))))


def test_a_loop_that_calls_parts_of_the_model_is_synced():
    def make() -> nn.Module:
        model = net()
        model.__class__ = InParts
        return model

    check_equal(make, batches([9, 4], 0), size=2)


def test_a_rank_with_unused_parameters_does_not_block_the_statistics_of_others():
    """Rank 1 does not use the last layer, so its first bucket is complete only when its backward ends."""

    def body(comm):
        model = net()
        wrapped = wrap(comm, model, unused="allow", bucket_bytes=100)
        for inputs, _ in batches([8, 8, 8], 0):
            hidden = model.block(model.first(part((inputs, inputs), comm.rank, 2)[0]))
            (hidden if comm.rank else model.head(hidden)).square().sum().backward()
            wrapped.step()
        return buffers(model)

    first, second = threads.run(2, body)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- the user's model -----------------------------------------------------------------------------------


def test_copies_of_a_wrapped_model_are_plain_and_need_no_other_rank():
    (batch,) = batches([9], 0)

    def body(comm):
        model = net()
        own_forward = functools.partial(type(model.other).forward, model.other)
        model.other.forward = own_forward  # the user's own
        before = [(name, type(module)) for name, module in model.named_modules()]
        wrapped = wrap(comm, model)
        run_loop(model, wrapped, [batch], rank=comm.rank, size=2)
        assert [(name, type(module)) for name, module in model.named_modules()] == before
        assert model.state_dict().keys() == net().state_dict().keys()
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
        plain = net()
        plain.load_state_dict(model.state_dict())
        if comm.rank == 0:  # alone
            expected = plain(batch[0])
            for each in copies:
                assert not any(isinstance(vars(m).get("forward"), SyncedInTraining) for m in each.modules())
                assert torch.equal(each(batch[0]), expected)
                assert torch.equal(buffers(each)["norm.running_mean"], buffers(plain)["norm.running_mean"])
        wrap(comm, model, batch_norm="local")  # a newer owner, which syncs nothing
        assert model.other.forward is own_forward
        assert "forward" not in vars(model.norm)

    threads.run(2, body)


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_one_rank_may_evaluate_alone(options):
    first, other = batches([9, 9], 0)

    def body(comm):
        model = net(**options)
        run_loop(model, wrap(comm, model), [first], rank=comm.rank, size=2)
        if comm.rank == 0:
            alone = net(**options)
            alone.load_state_dict(model.state_dict())
            assert torch.equal(model.eval()(other[0]), alone.eval()(other[0]))

    threads.run(2, body)


def test_a_norm_in_evaluation_mode_without_running_statistics_is_synced_while_the_model_trains():
    def make() -> nn.Module:
        model = net(track_running_stats=False)
        model.get_submodule("other").eval()
        return model

    check_equal(make, batches([9, 4], 0), size=2)


def test_a_newer_wrapper_syncs_in_place_of_the_earlier_one(monkeypatch):
    used = []
    all_gather = StatisticsExchange.all_gather

    def recorded(self, *args):
        used.append(id(self))
        return all_gather(self, *args)

    monkeypatch.setattr(StatisticsExchange, "all_gather", recorded)
    given_batches = batches([9, 5], 0)
    alone = net()
    _, expected = run_loop(alone, sgd(alone.parameters()), given_batches)

    def body(comm):
        model = net()
        wrappers = [wrap(comm, model), wrap(comm, model)]
        _, state = run_loop(model, wrappers[1], given_batches, rank=comm.rank, size=2)
        return state, wrappers

    ranks = threads.run(2, body)
    assert len(set(used)) == 2  # one for each rank
    torch.testing.assert_close(ranks[0][0], expected, rtol=TOLERANCE, atol=TOLERANCE)


# ---- ranks that take other paths ------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("way", ["order", "once more", "once less", "no norm", "frozen"])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_ranks_that_normalize_at_different_places_raise_and_do_not_wait(way, transport):
    inputs, _ = batches([4], 0)[0]

    def body(comm):
        model = net()
        wrapped = wrap(comm, model, unused="allow", transport=transport)
        ways = {
            "order": lambda x: model.norm(model.other(x)),
            "once more": lambda x: model.norm(model.other(model.norm(x))),
            "once less": lambda x: model.norm(x),
            "no norm": lambda x: x,
            "frozen": lambda x: model.other.eval()(model.norm(x)),
        }
        forward = ways[way] if comm.rank else lambda x: model.other(model.norm(x))

        def update() -> None:
            forward(model.first(inputs + comm.rank)).square().sum().backward()
            wrapped.step()

        with pytest.raises(DivergenceError, match=r"rank 1 is at the .*, rank 0 is at the"):
            update()

    threads.run(2, body)


# ---- what is refused ------------------------------------------------------------------------------------


def refusal(comm, model, **fields):
    with pytest.raises(PlanError) as refused:
        wrap(comm, model, **fields)
    return str(refused.value)


def test_what_parallelize_refuses_is_refused_in_the_same_words():
    def body(comm):
        model = net()
        vars(model.norm)["_compiled_call_impl"] = model.norm.forward  # as .compile() does, without the compiler
        found = [refusal(comm, model)]
        model = nn.SyncBatchNorm.convert_sync_batchnorm(net(dims=2))
        vars(model.get_submodule("norm"))["process_group"] = object()
        return [*found, refusal(comm, model), refusal(comm, net(), microbatches=2), refusal(comm, net(), sync="local")]

    for compiled, group, microbatches, local in threads.run(2, body):
        assert 'batch_norm = "sync" and compiled code at norm' in compiled
        assert "its own process group at norm" in group
        assert 'batch_norm = "sync" with microbatches = 2' in microbatches
        assert 'batch_norm = "sync" with sync = "local"' in local


@pytest.mark.parametrize("change", ["new", "forward"])
def test_a_step_refuses_norms_that_are_not_synced_any_more(change):
    (batch,) = batches([9], 0)

    def body(comm):
        model = net()
        wrapped = wrap(comm, model, unused="allow")
        if change == "new":
            model.other = copy.deepcopy(model.norm)
        else:
            model.other.forward = functools.partial(type(model.other).forward, model.other)
        inputs, targets = part(batch, comm.rank, 2)
        before = model.head.weight.detach().clone()
        loss(model(inputs), targets).sum().backward()
        with pytest.raises(TaskError, match="batch normalization at other, which is new, or has another forward"):
            wrapped.step()
        assert torch.equal(model.head.weight, before)

    threads.run(2, body)


def test_uneven_inputs_are_refused_before_a_rank_waits():
    def body(comm):
        model = net()
        wrapped = wrap(comm, model)
        with pytest.raises(TrainingError, match=r'join\(\) with batch_norm = "sync"'), wrapped.join():
            raise AssertionError("not entered")
        plain = nn.Sequential(nn.Linear(8, 3)).double()
        with wrap(comm, plain).join():  # there is nothing to sync
            pass

    threads.run(2, body)
