"""Laws of batch_norm = "sync": statistics of all ranks, training and running statistics as on one device."""

import copy
import functools
import pickle
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.model.sync_batch_norm import StatisticsExchange, local_moments, merge
from fourfold.plan.batch_norm import statistics_sent_bytes
from fourfold.plan.plan import Plan
from fourfold.step.model_checks import check_plan_for_model
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.words.errors import DivergenceError, PlanError, TaskError
from tests.classification import local_batch, loss, sgd
from tests.norm_cases import KINDS, Net, WithActivation, batches, buffers, images, net, resnet

TOLERANCE = 1e-12


def expected_training(model, given_batches):
    result = oracle.train(model, loss, sgd, given_batches)
    return result, buffers(model)


def train(comm, model, plan, given_batches):
    step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)
    losses = [step(local_batch(batch, plan, step.dp_index)).loss for batch in given_batches]
    step.flush()
    return oracle.snapshot(step, losses, []), buffers(step.model)


def check_equal(make, plan, given_batches, *, hosts=1, tolerance=TOLERANCE):
    """Trained on the ranks of the plan as on one device; running statistics are the same on all ranks, bit for bit."""
    expected, expected_buffers = expected_training(make(), given_batches)
    ranks = threads.run(plan.dp, lambda comm: train(comm, make(), plan, given_batches), hosts=hosts)
    assert max(oracle.deviation(got, expected) for got, _ in ranks) <= tolerance
    for _, found in ranks:
        assert found.keys() == expected_buffers.keys()
        for name, buffer in found.items():
            assert torch.equal(buffer, ranks[0][1][name]), name
            torch.testing.assert_close(buffer, expected_buffers[name], rtol=tolerance, atol=tolerance)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    dims=st.sampled_from(range(4)),
    kind=st.sampled_from(KINDS),
    dp=st.integers(1, 4),
    sizes=st.lists(st.integers(3, 9), min_size=2, max_size=3),
    zero=st.integers(0, 3),
    update=st.sampled_from(["after", "in_backward", "in_forward"]),
    transport=st.sampled_from(["auto", "gloo"]),
    hosts=st.sampled_from([1, 2]),
    options=st.sampled_from(
        [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.7, "eps": 1e-2}]
    ),
    bucket_bytes=st.sampled_from([100, 4000]),
)
def test_statistics_over_ranks_train_as_on_one_device(
    dims, kind, dp, sizes, zero, update, transport, hosts, options, bucket_bytes
):
    if kind == "frozen weights" and options.get("affine") is False:
        options = {}
    plan = Plan(dp=dp, zero=zero, update=update, transport=transport, bucket_bytes=bucket_bytes, batch_norm="sync")
    make = functools.partial(net, kind, dims=dims, **options)
    check_equal(make, plan, batches([9, *sizes], dims), hosts=min(hosts, dp))


# ---- models of the library ------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "width"), [("transformers", 24), ("torchvision", 64)])
def test_a_stock_resnet_trains_as_on_one_device(library, width):
    plan = Plan(dp=3, batch_norm="sync", zero=1, bucket_bytes=1 << 20)
    # Many norms behind each other, of few values a channel at the last ones, amplify rounding.
    check_equal(functools.partial(resnet, library), plan, images(6, 2, 5, width=width), tolerance=1e-9)


def test_torch_sync_batch_norm_and_subclasses_are_synced():
    def converted() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(net(dims=2))

    for make in (converted, functools.partial(net, dims=2, norm=WithActivation)):
        plan, given_batches = Plan(dp=2, batch_norm="sync"), batches([9, 4], 2)
        check_equal(make, plan, given_batches)


# ---- numbers --------------------------------------------------------------------------------------------


def test_merged_moments_are_as_accurate_in_float32_as_those_of_one_device():
    generator = torch.Generator().manual_seed(0)
    x = 1000 + torch.randn(999, 4, 7, generator=generator)
    exact = x.double().var((0, 2), correction=0)
    merged = merge([local_moments(part) for part in x.split([1, 600, 0, 398])])
    one_device = local_moments(x)
    assert merged.num_values == x.numel() / 4
    error = ((merged.variance - exact) / exact).abs().max()
    assert error <= 2 * ((one_device.variance - exact) / exact).abs().max() + 1e-6
    naive = (x.square().mean((0, 2)) - x.mean((0, 2)).square()).double()
    assert ((naive - exact) / exact).abs().max() > 100 * error  # what a sum of squares in float32 would give


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_byte_models_have_float32_statistics_of_all_ranks(precision):
    plan, (batch,) = Plan(dp=2, batch_norm="sync", precision=precision), batches([8], 2)
    batch = batch[0].float(), batch[1]

    def body(comm):
        step = TrainStep(net(dims=2).float(), loss, sgd, plan=plan, communicator=comm, clip=None)
        step(local_batch(batch, plan, comm.rank))
        return buffers(step.model)

    expected = net(dims=2).float()
    expected(batch[0])
    for found in threads.run(2, body):
        torch.testing.assert_close(found, buffers(expected), rtol=0.02, atol=0.02)
        assert found["norm.running_mean"].dtype == torch.float32


# ---- evaluation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(9, 5), (9, 1)])
def test_an_evaluation_without_running_statistics_takes_those_of_the_global_batch(sizes):
    plan, (first, other) = Plan(dp=2, batch_norm="sync"), batches(sizes, 2)
    make = functools.partial(net, dims=2, track_running_stats=False)
    with torch.no_grad():
        expected = loss(make().eval()(other[0]), other[1]).mean().item()

    def body(comm):
        step = TrainStep(make(), loss, sgd, plan=plan, communicator=comm, clip=None)
        step.dry_run(local_batch(first, plan, comm.rank))
        local = local_batch(other, plan, comm.rank)
        run = step.run_forward(local if len(local[1]) else None)
        with step.inference() as model:  # of one rank: no other takes part
            if comm.rank == 0:
                model(other[0])
        return step.evaluate(local).loss, 0.0 if run is None else run.loss.total.item()

    ranks = threads.run(2, body)
    assert all(value == pytest.approx(expected, abs=1e-12) for value, _ in ranks)
    assert sum(total for _, total in ranks) / sizes[1] == pytest.approx(expected, abs=1e-12)


def test_an_evaluation_by_running_statistics_communicates_nothing():
    plan, (batch,), calls = Plan(dp=2, batch_norm="sync"), batches([9], 2), list[int]()
    all_gather = StatisticsExchange.all_gather

    def recorded(*args):
        calls.append(threading.get_ident())
        return all_gather(*args)

    def body(comm):
        step = TrainStep(net(dims=2), loss, sgd, plan=plan, communicator=comm, clip=None)
        local = local_batch(batch, plan, comm.rank)
        step(local)
        before = calls.count(threading.get_ident())
        step.evaluate(local)
        return before, calls.count(threading.get_ident()) - before

    with mock.patch.object(StatisticsExchange, "all_gather", recorded):
        assert threads.run(2, body) == [(2 * 3, 0)] * 2  # two norms and the end, in forward and in backward


# ---- steps that change nothing --------------------------------------------------------------------------


def test_a_step_without_samples_on_any_rank_changes_no_statistics():
    plan, (batch,) = Plan(dp=2, batch_norm="sync"), batches([9], 0)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None, skip_nan=1)
        local = local_batch(batch, plan, comm.rank)
        step(local)
        before = buffers(step.model)
        step((local[0][:0], local[1][:0]))
        return all(torch.equal(before[name], buffer) for name, buffer in step.model.named_buffers())

    assert threads.run(2, body) == [True, True]


def test_a_skipped_step_restores_the_statistics():
    plan, (batch,) = Plan(dp=2, batch_norm="sync"), batches([9], 0)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None, skip_nan=1)
        inputs, targets = local_batch(batch, plan, comm.rank)
        step((inputs, targets))
        before = buffers(step.model)
        assert step((inputs * float("nan") if comm.rank else inputs, targets)).skipped
        return all(torch.equal(before[name], buffer) for name, buffer in step.model.named_buffers())

    assert threads.run(2, body) == [True, True]


def test_one_value_per_channel_on_all_ranks_is_refused_on_all_ranks():
    plan, (first, one) = Plan(dp=2, batch_norm="sync"), batches([9, 1], 0)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        step(local_batch(first, plan, comm.rank))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            step(local_batch(one, plan, comm.rank))

    threads.run(2, body)


# ---- the user's model -----------------------------------------------------------------------------------


def test_between_steps_the_model_is_as_the_user_made_it():
    plan, (batch,) = Plan(dp=2, batch_norm="sync"), batches([9], 0)

    def body(comm):
        model = net()
        model.other.forward = functools.partial(type(model.other).forward, model.other)  # the user's own
        own_forward, before = model.other.forward, [(name, type(m)) for name, m in model.named_modules()]
        step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)
        step(local_batch(batch, plan, comm.rank))
        assert [(name, type(m)) for name, m in model.named_modules()] == before
        assert model.state_dict().keys() == net().state_dict().keys()
        assert model.other.forward is own_forward
        assert "forward" not in vars(model.norm)
        del model.other.forward
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        return [each(batch[0]).sum().item() for each in (model, *copies)]  # by this rank alone

    for sums in threads.run(2, body):
        assert len(set(sums)) == 1


def test_a_step_that_fails_leaves_the_model_as_it_was():
    plan, (batch,) = Plan(dp=2, batch_norm="sync"), batches([9], 0)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        inputs, targets = local_batch(batch, plan, comm.rank)
        step((inputs, targets))
        step.model.get_submodule("norm").register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step((inputs, targets))
        assert not any("forward" in vars(module) for module in step.model.modules())

    threads.run(2, body)


# ---- ranks that take other paths ------------------------------------------------------------------------


class Wayward(Net):
    """One rank does something else, from the second step on: norms in another order, once more, or not at all."""

    def __init__(self, way: str, rank: int) -> None:
        super().__init__()
        self.way, self.rank, self.num_steps = way, rank, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0 or self.num_steps == 0:
            return super().forward(x)
        x = self.first(x)
        if self.way == "order":
            return self.head(torch.tanh(self.norm(self.mid(self.other(x)))))
        if self.way == "once more":
            return self.head(self.norm(self.block(x)))
        if self.way == "no backward":
            self.norm(x)
            return self.head(torch.tanh(self.other(self.mid(x))))
        return self.head(torch.tanh(self.mid(self.norm(x))))  # "once less"


@pytest.mark.parametrize("way", ["order", "once more", "once less", "no backward"])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_ranks_that_normalize_at_different_places_raise_and_do_not_wait(way, transport):
    plan, (batch,) = Plan(dp=2, batch_norm="sync", unused="allow", transport=transport), batches([9], 0)

    def body(comm):
        model = Wayward(way, comm.rank).double().train()
        step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)
        local = local_batch(batch, plan, comm.rank)
        step(local)
        vars(model)["num_steps"] = 1
        with pytest.raises(DivergenceError, match=r"rank 1 is at the .*, rank 0 is at the"):
            step(local)

    threads.run(2, body)


def test_a_norm_that_one_rank_freezes_is_named_before_the_step():
    plan, (batch,) = Plan(dp=2, batch_norm="sync"), batches([9], 0)

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        local = local_batch(batch, plan, comm.rank)
        step(local)
        step.model.get_submodule("other").train(comm.rank == 0)
        with pytest.raises(DivergenceError, match="rank 1 is at step 2, with frozen batch normalization at other"):
            step(local)

    threads.run(2, body)


# ---- what is refused, and what is seen ------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "reason"), [
    (Plan(dp=2, microbatches=2, batch_norm="sync"), "microbatches = 2 .*second forward"),
    (Plan(dp=2, cp=2, batch_norm="sync"), "cp = 2 .*whole samples"),
    (Plan(dp=2, sync="local", batch_norm="sync"), 'sync = "local" .*each forward together'),
])  # fmt: skip
def test_plans_without_whole_batches_are_refused_with_the_reason(plan, reason):
    with pytest.raises(PlanError, match=f'batch_norm = "sync" with {reason}'):
        check_plan_for_model(net(), plan, clip=None)


def test_compiled_norms_and_norms_of_some_ranks_are_refused():
    model = net()
    vars(model.norm)["_compiled_call_impl"] = model.norm.forward  # as .compile() does, without importing the compiler
    with pytest.raises(PlanError, match='batch_norm = "sync" and compiled code at norm'):
        check_plan_for_model(model, Plan(dp=2, batch_norm="sync"), clip=None)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net(dims=2))
    vars(model.get_submodule("norm"))["process_group"] = object()
    with pytest.raises(PlanError, match="its own process group at norm"):
        check_plan_for_model(model, Plan(dp=2, batch_norm="sync"), clip=None)


class Mixing(Net):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs - 1e-3 * outputs.mean(0)


def test_other_couplings_of_samples_are_still_refused():
    plan, (batch,) = Plan(dp=2, batch_norm="sync"), batches([24], 0)

    def body(comm):
        step = TrainStep(Mixing().double(), loss, sgd, plan=plan, communicator=comm, clip=None)
        with pytest.raises(TaskError):
            step(local_batch(batch, plan, comm.rank))

    threads.run(2, body)


@pytest.mark.parametrize("value", ["scalar", "pair"])
def test_empty_ranks_take_part_whatever_the_loss_returns(value):
    def scalar_or_pair(outputs: Tensor, targets: Tensor):
        values = F.cross_entropy(outputs, targets, reduction="none")
        return values.mean() if value == "scalar" else (values.sum(), len(values))

    plan, given_batches = Plan(dp=4, batch_norm="sync"), batches([9, 3], 0)
    expected, _ = expected_training(net(), given_batches)

    def body(comm):
        step = TrainStep(net(), scalar_or_pair, sgd, plan=plan, communicator=comm, clip=None)
        losses = [step(local_batch(batch, plan, comm.rank)).loss for batch in given_batches]
        return oracle.snapshot(step, losses, [])

    assert max(oracle.deviation(got, expected) for got in threads.run(4, body)) <= TOLERANCE


def test_a_step_sends_as_many_bytes_for_statistics_as_show_says():
    given_batches = batches([9, 9], 0)

    def body(comm, batch_norm):
        plan = Plan(dp=3, batch_norm=batch_norm, transport="gloo")
        step = TrainStep(net(), loss, sgd, plan=plan, communicator=comm, clip=None)
        return [step(local_batch(batch, plan, comm.rank)).sent_bytes for batch in given_batches][1]

    synced, local = (threads.run(3, functools.partial(body, batch_norm=kind)) for kind in ("sync", "local"))
    sent = [a - b for a, b in zip(synced, local, strict=True)]
    assert sent == pytest.approx([statistics_sent_bytes([5, 5], 3)] * 3, abs=1e-6)
