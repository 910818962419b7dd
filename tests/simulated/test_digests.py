"""Laws of what ranks hash and compare: each row of the table has a test, made of the table. Ranks are threads."""

import argparse
import dataclasses
import functools
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fourfold as ff
from fourfold.feed.feed import Feed
from fourfold.feed.source import TensorSource
from fourfold.proof.digests import build
from fourfold.proof.digests.build import function_items, model_items
from fourfold.proof.digests.table import TABLE
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import FourfoldError, PlanError
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("without_dry_run")

SGD = functools.partial(torch.optim.SGD, lr=0.1)
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def squares(outputs, targets):
    return (outputs - targets).square()


def halves(outputs, targets):
    return (outputs - targets).square() / 2


@dataclasses.dataclass
class Built:
    """What a rank builds its step of, and trains it with."""

    model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    loss: Any = dataclasses.field(default_factory=lambda: squares)
    optimizer: Any = SGD
    plan: ff.Plan = dataclasses.field(default_factory=lambda: ff.Plan(dp=2))
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: Callable[[int, int], Any] = lambda rank, step: (INPUTS[rank::2] + step, INPUTS[rank::2])
    source: Any = None
    edit: Callable[[nn.Module], Any] = lambda model: None

    def train(self, comm: Any, steps: int = 4) -> None:
        torch.manual_seed(0)
        model, options = self.model(), {"communicator": comm, **self.options}
        step = TrainStep(model, self.loss, self.optimizer, plan=self.plan, **options)
        if self.source is not None:
            feed = Feed(self.source, batch_size=8)
            feed._size, feed._index = comm.size, comm.rank  # threads are ranks here
            for batch in feed:
                step(batch)
            return
        self.edit(model)
        for number in range(steps):
            step(self.batch(comm.rank, number))


SHARED = {"plan": ff.Plan(tp=2), "options": {"tensor": {"0": "column", "2": "row"}}}
"""Ranks that work on the same samples."""


def one_batch(rank, step):
    return INPUTS + step, INPUTS


# By row: what all ranks build, and what rank 1 has in its place.
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plan": ({}, {"plan": ff.Plan(dp=2, microbatches=2)}),
    "options": ({}, {"options": {"clip": 1.0}}),
    "model": ({}, {"model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU())}),
    "loss": ({}, {"loss": halves}),
    "optimizer": ({}, {"optimizer": functools.partial(SGD, momentum=0.5)}),
    "source": (
        {"source": TensorSource(INPUTS, INPUTS)},
        {"source": TensorSource(INPUTS.flip(0), INPUTS)},
    ),
    "batch": ({**SHARED, "batch": one_batch}, {"batch": lambda rank, step: (INPUTS, INPUTS)}),
    "samples": ({"batch": one_batch}, {}),
    "weights": ({}, {"edit": lambda model: model[0].weight.data.add_(1e-3)}),
}
ELSEWHERE = {
    "call": "test_a_step_and_a_wrapped_optimizer_are_not_one_build",
    "versions": "test_other_versions_are_refused",
    "saved values": "tests/simulated/test_own_checkpoints.py",
}


def test_every_row_of_the_table_has_a_test():
    assert set(TABLE) == {*BROKEN, *ELSEWHERE}


def test_the_docs_have_every_row_of_the_table():
    page = (ROOT / "docs" / "dry-run.md").read_text()
    for kind, row in TABLE.items():
        assert re.search(rf"^\| {kind} \| .* \| `{row.error.__name__}` \|$", page, re.MULTILINE)


def errors(body: Callable[[Any], Any], size: int = 2) -> list[tuple[type, str]]:
    """What each rank raises."""

    def caught(comm):
        with pytest.raises(FourfoldError) as error:
            body(comm)
        return type(error.value), str(error.value)

    return threads.run(size, caught)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_raises_the_same_error_on_every_rank(kind):
    common, other = BROKEN[kind]
    found = errors(lambda comm: Built(**{**common, **(other if comm.rank else {})}).train(comm))
    assert len(set(found)) == 1
    error, message = found[0]
    assert error is TABLE[kind].error
    assert TABLE[kind].where in message
    assert TABLE[kind].need in message
    assert "rank" in message


@pytest.mark.parametrize("common", [{}, {**SHARED, "batch": one_batch}, {"source": TensorSource(INPUTS, INPUTS)}])
def test_ranks_that_build_and_read_the_same_train(common):
    threads.run(2, lambda comm: Built(**common).train(comm))


def wrapped(comm: Any, model: nn.Module, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(SGD(model.parameters()), model, communicator=comm, **options)


def test_a_step_and_a_wrapped_optimizer_are_not_one_build():
    for _, message in errors(lambda comm: wrapped(comm, Built().model()) if comm.rank else Built().train(comm)):
        assert "rank 0 has ff.parallelize; rank 1 has ff.DistributedOptimizer" in message


def test_other_versions_are_refused(monkeypatch):
    ranks: dict[int, int] = {}
    monkeypatch.setattr(build, "version_items", lambda: [("torch", f"2.{ranks[threading.get_ident()]}")])

    def body(comm):
        ranks[threading.get_ident()] = comm.rank
        Built().train(comm)

    for _, message in errors(body):
        assert "rank 0 has torch = 2.0; rank 1 has torch = 2.1" in message


def test_a_plan_that_does_not_fit_the_ranks_is_told_by_all_of_them():
    for _, message in errors(lambda comm: Built(plan=ff.Plan(pp=2) if comm.rank else ff.Plan(dp=4)).train(comm)):
        assert "rank 0 has dp = 4; rank 1 has dp = 1" in message


def test_groups_of_ranks_are_named():
    plans = [ff.Plan(dp=4, bucket_bytes=size) for size in (4096, 8192, 4096, 4096)]
    for _, message in errors(lambda comm: Built(plan=plans[comm.rank]).train(comm), size=4):
        assert "rank 1 has bucket_bytes = 8192; ranks 0, 2 and 3 have bucket_bytes = 4096" in message


class Net(nn.Module):
    """A model with settings of its own."""

    def __init__(self, function=F.relu, **settings: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        vars(self).update(settings)

    def forward(self, inputs):
        return self.function(self.layer(inputs))


def scaled(factor):
    return lambda inputs: inputs * factor


def named(**settings):
    return argparse.Namespace(**settings)


def with_buffer(*shape):
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.ones(shape))
    return model


def tied(is_tied):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if is_tied:
        model[1].weight = model[0].weight
    return model


OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "a module without parameters": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        "rank 0 has nothing; rank 1 has module 1 = torch.nn.ReLU",
    ),
    "another class": (nn.ReLU, nn.GELU, "the model = torch.nn.ReLU; rank 1 has the model = torch.nn.GELU"),
    "order": (
        lambda: nn.Sequential(nn.ReLU(), nn.Tanh()),
        lambda: nn.Sequential(nn.Tanh(), nn.ReLU()),
        "module 0 = torch.nn.ReLU; rank 1 has module 0 = torch.nn.Tanh",
    ),
    "a setting": (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2), r"rank 0 has p = 0.1; rank 1 has p = 0.2"),
    "eps": (lambda: nn.LayerNorm(4), lambda: nn.LayerNorm(4, eps=1e-3), "eps = 1e-05; rank 1 has eps = 0.001"),
    "a text": (lambda: nn.GELU(), lambda: nn.GELU("tanh"), "approximate = 'none'; rank 1 has approximate = 'tanh'"),
    "a number of heads": (
        lambda: nn.MultiheadAttention(4, 1),
        lambda: nn.MultiheadAttention(4, 2),
        "num_heads = 1; rank 1 has num_heads = 2",
    ),
    "a function": (lambda: Net(F.relu), lambda: Net(F.gelu), "function ="),
    "a lambda": (lambda: Net(lambda x: x * 2), lambda: Net(lambda x: x * 3), "function ="),
    "a closure": (lambda: Net(scaled(2.0)), lambda: Net(scaled(3.0)), "function ="),
    "a partial": (
        lambda: Net(functools.partial(F.leaky_relu, negative_slope=0.1)),
        lambda: Net(functools.partial(F.leaky_relu, negative_slope=0.2)),
        "function =",
    ),
    "a list": (lambda: Net(sizes=[1, 2]), lambda: Net(sizes=[1, 3]), "sizes = (1, 2); rank 1 has sizes = (1, 3)"),
    "a configuration": (lambda: Net(args=named(top=1)), lambda: Net(args=named(top=2)), "args ="),
    "the mode": (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.1).eval(), "torch.nn.Dropout, in evaluation mode"),
    "a frozen weight": (
        lambda: nn.Linear(4, 4),
        lambda: nn.Linear(4, 4).requires_grad_(False),
        "weight = [4, 4] float32; rank 1 has weight = [4, 4] float32, frozen",
    ),
    "a dtype": (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4).double(), "[4, 4] float64"),
    "a buffer": (lambda: with_buffer(4), lambda: with_buffer(2), "mask = [4] float32; rank 1 has mask = [2] float32"),
    "a tie": (lambda: tied(False), lambda: tied(True), "1.weight = the same as 0.weight"),
}


@pytest.mark.parametrize("difference", OTHER_MODELS)
def test_another_model_is_refused_and_what_differs_is_named(difference):
    first, other, expected = OTHER_MODELS[difference]

    def body(comm):
        model = other() if comm.rank else first()
        build.check_same_build(comm, "a call", model, plan=ff.Plan(dp=2), options={})

    for error, message in errors(body):
        assert error is PlanError
        assert "the models of the ranks" in message
        assert expected in message


@pytest.mark.parametrize("plan", [ff.Plan(dp=2), ff.Plan(pp=2, microbatches=2), ff.Plan(cp=2)])
def test_another_model_is_refused_on_every_axis(plan):
    first, other = Built().model, BROKEN["model"][1]["model"]
    for _, message in errors(lambda comm: Built(model=other if comm.rank else first, plan=plan).train(comm)):
        assert "rank 0 has nothing; rank 1 has module 3 = torch.nn.ReLU" in message


def test_another_model_is_refused_by_a_wrapped_optimizer():
    first, other = Built().model, BROKEN["model"][1]["model"]
    for _, message in errors(lambda comm: wrapped(comm, (other if comm.rank else first)())):
        assert "rank 0 has nothing; rank 1 has module 3 = torch.nn.ReLU" in message


@pytest.mark.parametrize("name", ["rank", "local_rank", "device", "log_dir", "is_main_process", "cachePath", "_calls"])
def test_what_is_a_ranks_own_may_differ(name):
    threads.run(2, lambda comm: wrapped(comm, Net(**{name: comm.rank})))


def test_items_are_the_same_in_every_process():
    """Sets are in the order of a process; objects have addresses."""
    letters = {"a", "b", "c", "d"}
    made = [
        Net(kept=set(order), other=object(), by={object(): 1}, loss=lambda x: x in {"a", "b", "c"})
        for order in (letters, "dcba")
    ]
    first, second = (list(model_items(model, lambda tensor: list(tensor.shape))) for model in made)
    assert first == second
    assert not any("0x" in text for _, text in first)
    assert function_items(squares) != function_items(halves)


def test_private_attributes_of_a_configuration_and_the_order_of_its_attributes_are_not_compared():
    def model(**fields: object) -> nn.Module:
        model = nn.Linear(2, 2)
        vars(model)["config"] = SimpleNamespace(**fields)
        return model

    def items(**fields: object) -> list[tuple[str, str]]:
        return list(model_items(model(**fields), lambda tensor: list(tensor.shape)))

    assert items(width=2, bias=True, _hash=1) == items(bias=True, width=2, _hash=2)
    assert items(width=2) != items(width=3)
