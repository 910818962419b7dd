"""Laws of loss scaling: an overflow is found on all ranks, and costs one step."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.plan.precision import LossScaler
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import PlanError, TrainingError
from tests import cases, pairs
from tests.precision_oracle import CASE, ZERO_FIELDS, equal_tensors, train_on_threads, train_oracle

pytestmark = pytest.mark.usefixtures("without_dry_run")

FP16 = dataclasses.replace(CASE, precision="fp16", batch_sizes=(12, 12, 12))


@given(overflows=st.lists(st.booleans(), max_size=40), interval=st.integers(1, 4))
def test_the_scales_equal_those_of_torchs_grad_scaler(overflows, interval):
    weight = nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.sum())  # it creates its scale in the first call
    scale = LossScaler(growth_interval=interval)
    for overflowed in overflows:
        assert scale.value == scaler.get_scale()
        if scale.value == LossScaler.MIN_SCALE and overflowed:
            break  # torch goes below 1
        weight.grad = torch.tensor([float("inf" if overflowed else 1.0)])
        scaler.step(optimizer)
        scaler.update()
        scale.update(overflowed=overflowed)


def test_a_scale_stays_within_the_range_of_float32():
    scale = LossScaler(initial=2.0**127, growth_interval=1)
    scale.update(overflowed=False)
    assert scale.value == 2.0**127


@pytest.mark.parametrize("fields", pairs.grid(
    where=((1, 0), (2, 0), (2, 1), (2, 3)), microbatches=(1, 2), clip=(0.1, None)
))  # fmt: skip
def test_loss_scaling_does_not_change_training(fields):
    size, zero = fields["where"]
    case = dataclasses.replace(FP16, **ZERO_FIELDS[zero], microbatches=fields["microbatches"], clip=fields["clip"])
    expected = train_oracle(dataclasses.replace(case, reduce_dtype="fp32"), size)
    for got in train_on_threads(case, size):
        assert got.losses == pytest.approx(expected.losses, rel=1e-3)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 0), (2, 1)])
def test_weights_kept_in_float32_are_updated_by_unscaled_gradients(size, zero):
    def body(comm):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        make = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
        plan = Plan(dp=size, zero=zero, precision="fp16", batch_norm="local")
        loss = lambda outputs, _: 10 * (outputs - 1).square()  # noqa: E731
        step = TrainStep(model, loss, make, plan=plan, communicator=comm, clip=0.01)
        before = step.state_dict()["model"]
        while step((torch.randn(6, 4), torch.zeros(6))).overflowed:
            assert step.num_steps < 10
        after = step.state_dict()["model"]
        return [(after[name] - before[name]).norm().item() for name, _ in model.named_parameters()]

    for update_norms in threads.run(size, body):
        assert sum(each**2 for each in update_norms) ** 0.5 == pytest.approx(0.01, rel=1e-3)
        assert min(update_norms[2:]) > 1e-3


class ScaledGradients(nn.Module):
    """A layer whose gradients are multiplied by `factor`; the loss is not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.factor = 1.0

    def forward(self, x):
        return ScaleGradients.apply(self.layer(x), self.factor)


class ScaleGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * ctx.factor, None


def build(comm: Any, *, zero: int = 0, skip_nan: int = 0, clip: float | None = None, update: str = "after") -> Any:
    torch.manual_seed(1)
    plan = Plan(dp=comm.size, **ZERO_FIELDS[zero], update=update, precision="fp16", bucket_bytes=8)
    make = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    loss = lambda outputs, _: outputs.square()  # noqa: E731
    return TrainStep(ScaledGradients(), loss, make, plan=plan, communicator=comm, clip=clip, skip_nan=skip_nan)


DATA = torch.ones(2, 4), torch.zeros(2)


@pytest.mark.covering
@pytest.mark.parametrize(("clip", "update"), [(None, "after"), (1.0, "after"), (None, "in_forward")])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(zero, clip, update):
    def body(comm):
        step = build(comm, zero=zero, clip=clip, update=update)
        step(DATA)
        before = step.state_dict()
        step.model.factor = 1e6 if comm.rank == 1 else 1.0
        metrics = step(DATA)
        after = step.state_dict()
        assert (metrics.overflowed, metrics.skipped, metrics.loss_scale) == (True, None, 65536.0)
        assert equal_tensors(after["model"], before["model"])
        assert all(equal_tensors(*pair) for pair in zip(*(tensors(s) for s in (after, before)), strict=True))
        step.model.factor = 1.0
        metrics = step(DATA)
        assert (metrics.overflowed, metrics.loss_scale) == (False, 32768.0)
        assert not equal_tensors(step.state_dict()["model"], before["model"])
        return step.num_steps

    assert threads.run(2, body) == [3, 3]


def tensors(state):
    return [{key: torch.as_tensor(value) for key, value in keys.items()} for keys in state["optimizer"].values()]


def test_loss_scaling_preserves_gradients_too_small_for_float16():
    def is_updated(comm):
        step = build(comm)
        step.model.factor = 1e-7  # gradients of about 1: below half of the smallest float16, 6e-8
        step._parts.loss_scale.value = comm.scale
        before = step.state_dict()["model"]
        step(DATA)
        return not equal_tensors(step.state_dict()["model"], before)

    def with_scale(scale):
        def body(comm):
            comm.scale = scale
            return is_updated(comm)

        return threads.run(1, body)

    assert with_scale(65536.0) == [True]
    assert with_scale(1e-2) == [False]


def test_an_overflow_at_the_minimum_scale_is_a_bad_step():
    def body(comm, *, skip_nan):
        step = build(comm, skip_nan=skip_nan)
        step._parts.loss_scale.value = 2.0
        step.model.factor = float("inf")
        assert step(DATA).overflowed
        metrics = step(DATA)
        assert not metrics.overflowed
        assert "the gradient norm is" in metrics.skipped.text
        return step._parts.loss_scale.value

    assert threads.run(2, lambda comm: body(comm, skip_nan=1)) == [1.0, 1.0]
    with pytest.raises(TrainingError, match="the gradient norm is"):
        threads.run(2, lambda comm: body(comm, skip_nan=0))


def test_a_nan_loss_is_a_bad_step_at_any_scale():
    def body(comm):
        step = build(comm, skip_nan=1)
        metrics = step((DATA[0] * float("inf"), DATA[1]))
        return metrics.overflowed, metrics.skipped.text.split(";")[0], step._parts.loss_scale.value

    assert threads.run(2, body) == [(False, "step 1: the loss is nan", 65536.0)] * 2


def test_the_scale_is_restored_with_the_state():
    def body(comm, state=None):
        step = build(comm)
        if state is not None:
            step.load_state_dict(state)
            return step(DATA).loss_scale, step._parts.loss_scale.state
        step(DATA)
        step.model.factor = 1e6
        step(DATA)
        step.model.factor = 1.0
        step(DATA)
        return step.state_dict()

    state = threads.run(1, body)[0]
    assert threads.run(1, lambda comm: body(comm, state)) == [(32768.0, {"value": 32768.0, "good": 2})]


@pytest.mark.parametrize(("fields", "message"), [
    ({"update": "in_backward"}, "no gradient has overflowed before the first bucket"),
    ({"codec": "topk"}, "finite gradients"),
    ({"sync": "local"}, "an average of the weights that the update keeps"),
    ({"sync": "local", "offload": "states"}, "weights that are averaged on the device where"),
])  # fmt: skip
def test_loss_scaling_is_refused_where_an_overflow_is_found_too_late(fields, message):
    case = dataclasses.replace(FP16, **fields)
    model, loss, optimizer = cases.model(case.model), cases.loss(case), cases.optimizer(case)
    with pytest.raises(PlanError, match=message):
        parallelize(model, loss, optimizer, case.plan(1))
