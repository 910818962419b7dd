"""Backwards in two halves: what zero-bubble and written programs train is what one device trains."""

import contextlib
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.torch_kit.deferred_grads import DeferredGrads
from fourfold.torch_kit.grad_hooks import GradHooks
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(4, 3, 5), length=8, clip=0.05, microbatches=4)
WRITTEN = """
0: F0.0 F0.1 F0.2 I0.0 W0.0 B0.1 F0.3 I0.2 I0.3 W0.2 W0.3
1: F1.0 I1.0 F1.1 F1.2 W1.0 B1.1 B1.2 F1.3 B1.3
"""


def make_model() -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=16, layers=4, heads=2, length=16, warmup=0).model().double()


@pytest.mark.parametrize(("fields", "hosts"), [
    ({"pp": 4}, 1),
    ({"pp": 2, "max_in_flight": 3}, 1),
    ({"pp": 2, "dp": 2, "zero": 2}, 1),
    ({"pp": 2, "dp": 2, "zero": 3}, 4),
    ({"pp": 2, "tp": 2}, 1),
    ({"pp": 2, "cp": 2, "zero": 1}, 1),
    ({"pp": 2, "dp": 2, "zero": 1, "update": "in_backward"}, 1),
    ({"pp": 2, "dp": 2, "zero": 1, "update": "in_forward"}, 1),
    ({"pp": 2, "schedule": "written", "program": WRITTEN}, 1),
])  # fmt: skip
def test_a_divided_backward_trains_as_one_device(fields, hosts):
    clip = None if fields.get("update") == "in_backward" else CASE.clip
    plan = Plan(**{"schedule": "zero-bubble", "microbatches": CASE.microbatches, "bucket_bytes": 4_000, **fields})
    expected = oracle.train(make_model(), cases.loss(CASE), cases.optimizer(CASE), cases.batches(CASE), clip=clip)

    def body(comm: Any) -> Any:
        options: dict[str, Any] = {"clip": clip, "tensor": lm.TENSOR_RULES if plan.tp > 1 else {}, "drift_check": 1}
        step = TrainStep(make_model(), cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm, **options)
        return cases.train_step(CASE, step)

    for got in threads.run(plan.mesh.size, body, hosts=hosts):
        assert oracle.deviation(got, expected) <= TOLERANCE


class Layers(nn.Module):
    """A linear layer, one used twice, one with a hook, a transposed one, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.once, self.twice, self.hooked = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.conv1d = nn.Parameter(torch.randn(6, 5))
        self.bias, self.norm = nn.Parameter(torch.randn(5)), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.twice(F.gelu(self.twice(self.once(x))))
        h = self.norm(self.hooked(h) + x)
        return torch.addmm(self.bias, h.view(-1, 6), self.conv1d).square().sum()


class Taken:
    """What a sink is told, and the gradients at that time."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters, self.grads = parameters, dict[int, torch.Tensor]()

    def on_grad(self, param_index: int) -> None:
        assert param_index not in self.grads
        gradient = self._parameters[param_index].grad
        assert gradient is not None
        self.grads[param_index] = gradient.clone()


def test_both_halves_give_what_one_backward_gives_and_the_second_has_the_linear_layers():
    whole, halved = Layers().double(), Layers().double()
    seen = []
    for model in (whole, halved):
        model.hooked.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    inputs = [torch.randn(2, 3, 6, dtype=torch.double) for _ in range(3)]
    parameters = list(halved.parameters())
    deferred, hooks = DeferredGrads(parameters), GradHooks(parameters)

    def first_half(x):
        with deferred.in_forward():
            loss = halved(x)
        with deferred.first_half(hooks) as pending:
            loss.backward()
        return pending

    pendings = [first_half(x) for x in inputs[:2]]
    assert all(parameter.grad is None for parameter in parameters)
    names = [name for name, _ in halved.named_parameters()]
    deferred_names = [names[product.param_index] for product in pendings[0].products]
    assert sorted(deferred_names) == ["conv1d", "once.weight", "twice.weight", "twice.weight"]
    assert pendings[0].num_bytes == 4 * 6 * 6 * 8
    for number, x in enumerate(inputs[:2]):
        if number == 1:  # a first half in between leaves what has been accumulated alone
            pendings.append(first_half(inputs[2]))
        whole(x).backward()
        taken = Taken(parameters)
        deferred.second_half(pendings[number], taken)
        assert set(taken.grads) == set(range(len(parameters)))
        for index, parameter in enumerate(whole.parameters()):
            torch.testing.assert_close(taken.grads[index], parameter.grad, rtol=0, atol=1e-12)
    assert len(seen) == 5  # the user's hook sees each gradient in backward


def test_a_users_own_backward_and_autocast_are_whole():
    model, x = Layers(), torch.randn(2, 3, 6)
    deferred = DeferredGrads(list(model.parameters()))
    with deferred.in_forward():
        loss = model(x)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    hooks = GradHooks(list(model.parameters()))
    with deferred.in_forward(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x)
    with deferred.first_half(hooks) as pending:
        loss.backward()
    assert not pending.products
    assert len(pending.others) == len(list(model.parameters()))


@pytest.mark.parametrize("rows", [(6,), (2, 3)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("around", [False, True], ids=["", "within saved tensor hooks"])
def test_a_checkpoint_of_the_users_own_keeps_its_gradients(rows, around):
    """Its second forward saves what torch's layers save: of a 2-D input and a square weight, equal shapes."""
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    x, outside = torch.randn(*rows, 6, dtype=torch.double), nn.Linear(6, 6).double()
    parameters = [*layers.parameters(), *outside.parameters()]
    expected = torch.autograd.grad(layers(outside(x)).square().sum(), parameters)
    deferred, hooks = DeferredGrads(parameters), GradHooks(parameters)
    saving = saved_tensors_hooks(lambda each: each, lambda each: each) if around else contextlib.nullcontext()
    with saving, deferred.in_forward():
        loss = checkpoint(layers, outside(x), use_reentrant=False).square().sum()
    with deferred.first_half(hooks) as pending:
        loss.backward()
    assert len(pending.products) == 1  # of `outside`
    deferred.second_half(pending, taken := Taken(parameters))
    for index, gradient in enumerate(expected):
        torch.testing.assert_close(taken.grads[index], gradient, rtol=0, atol=1e-12)


def test_only_the_thread_of_the_forward_defers():
    model, x = Layers(), torch.randn(3, 6)
    deferred, names = DeferredGrads(list(model.parameters())), list[str]()
    with deferred.in_forward():
        other = threading.Thread(target=lambda: names.append(type(model.once(x).grad_fn).__name__))
        other.start()
        other.join()
        names.append(type(model.once(x).grad_fn).__name__)
    assert names == ["AddmmBackward0", "_LinearBackward"]
