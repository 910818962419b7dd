"""Laws of an optimizer that is given to `ff.parallelize` itself: it stays the user's, and trains as in one process."""

import copy
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import fourfold as ff
from fourfold.comm import init
from fourfold.feed.source import TensorSource
from fourfold.optim import flat_optimizer
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import FourfoldError, OptimizerError

pytestmark = pytest.mark.usefixtures("without_dry_run")
STEPS = 6
PAGE = Path(__file__).parents[2] / "docs" / "from-ddp.md"


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return made


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean(1)


def batches(index: int, size: int) -> list[Any]:
    """The batches of one of `size` ranks."""
    generator = torch.Generator().manual_seed(1)
    wholes = [torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return [(whole[:, :6], whole[:, 6:]) for whole in (each.chunk(size)[index] for each in wholes)]


def decayed_and_not(mine: nn.Sequential, kind: Any, *, first: Any = None, **options: Any) -> Optimizer:
    """An optimizer of two groups, as usual: matrices with weight decay, vectors without."""
    matrices = [p for p in mine.parameters() if p.ndim > 1]
    vectors = [p for p in mine.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1, **(first or {})}, {"params": vectors, "lr": 0.02}]
    return kind(groups, **{"lr": 0.05, **options})


OPTIMIZERS: dict[str, Callable[[nn.Sequential], Optimizer]] = {
    "adamw": lambda mine: torch.optim.AdamW(mine.parameters(), lr=0.05),
    "groups": lambda mine: decayed_and_not(mine, torch.optim.AdamW, first={"betas": (0.5, 0.6), "amsgrad": True}),
    "one fused": lambda mine: decayed_and_not(mine, torch.optim.AdamW, first={"fused": True}, foreach=False),
    "foreach": lambda mine: decayed_and_not(mine, torch.optim.SGD, foreach=True, momentum=0.9, nesterov=True),
    "tensor rate": lambda mine: torch.optim.Adam(mine.parameters(), lr=torch.tensor(0.05, dtype=torch.float64)),
    "by name": lambda mine: torch.optim.RMSprop(mine.named_parameters(), lr=0.05, momentum=0.5),
    "adagrad": lambda mine: decayed_and_not(mine, torch.optim.Adagrad, initial_accumulator_value=0.1),
    "maximized": lambda mine: decayed_and_not(mine, torch.optim.SGD, first={"maximize": True}),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda made: lr_scheduler.CosineAnnealingLR(made, T_max=STEPS),
    "one cycle": lambda made: lr_scheduler.OneCycleLR(made, max_lr=0.1, total_steps=STEPS),  # momentum too
    "warm-up": lambda made: lr_scheduler.SequentialLR(
        made, [lr_scheduler.LinearLR(made, total_iters=3), lr_scheduler.ExponentialLR(made, 0.5)], [3]
    ),
    "plateau": lambda made: lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=10.0),
}


def advance(scheduler: Any) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def expected(make: Callable[[nn.Sequential], Optimizer], schedule: Callable[[Optimizer], Any]) -> oracle.TrainingResult:
    mine, losses = model(), []
    optimizer = make(mine)
    scheduler = schedule(optimizer)
    for inputs, targets in batches(0, 1):
        optimizer.zero_grad()
        mean = loss(mine(inputs), targets).mean()
        mean.backward()
        optimizer.step()
        advance(scheduler)
        losses.append(mean.item())
    return oracle.TrainingResult(losses, [], {name: p.detach().clone() for name, p in mine.named_parameters()})


def train(
    comm: Any,
    make: Callable[[nn.Sequential], Optimizer],
    schedule: Callable[[Optimizer], Any],
    plan: Plan,
    *,
    before: bool,
) -> float:
    """Train two ranks with an instance and a scheduler; returns the deviation from one process."""
    mine = model()
    optimizer = make(mine)
    scheduler = schedule(optimizer) if before else None
    step = TrainStep(mine, loss, optimizer, plan=plan, communicator=comm)
    assert step.optimizer is optimizer
    scheduler = scheduler or schedule(step.optimizer)
    losses = []
    for each in batches(comm.rank, comm.size):
        losses.append(step(each).loss)
        advance(scheduler)
    step.flush()
    return oracle.deviation(oracle.snapshot(step, losses, []), expected(make, schedule))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("kind", ["groups", "foreach"])
def test_a_scheduler_acts_on_the_next_update(kind, schedule, before):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")

        def body(comm):
            return train(comm, OPTIMIZERS[kind], SCHEDULERS[schedule], Plan(dp=2), before=before)

        assert max(threads.run(2, body)) <= TOLERANCE


@pytest.mark.covering
@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(dp=2, zero=1), Plan(dp=2, zero=3, update="in_forward")], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_instance_trains_as_in_one_process(kind, plan):
    def body(comm):
        return train(comm, OPTIMIZERS[kind], SCHEDULERS["cosine"], plan, before=True)

    assert max(threads.run(2, body)) <= TOLERANCE


def test_each_group_is_updated_by_the_implementation_that_it_chooses(monkeypatch):
    seen, update = [], flat_optimizer.step_without_wrappers

    def recorded(optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        seen.append((group["weight_decay"], bool(group["fused"]), bool(group["foreach"])))
        update(optimizer)

    monkeypatch.setattr(flat_optimizer, "step_without_wrappers", recorded)

    def body(comm):
        mine = model()
        optimizer = decayed_and_not(mine, torch.optim.AdamW, first={"fused": True}, foreach=True, weight_decay=0.0)
        optimizer.param_groups[0]["foreach"] = None
        TrainStep(mine, loss, optimizer, plan=Plan(), communicator=comm)(batches(0, 1)[0])

    threads.run(1, body)
    assert sorted(set(seen)) == [(0.0, False, True), (0.1, True, False)]


def test_parallelize_keeps_the_users_optimizer_and_its_scheduler(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that the test process keeps its number of threads
    local = threading.local()
    monkeypatch.setattr(init, "init_communicator", lambda: local.comm)

    def body(comm):
        local.comm, mine = comm, model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
        scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
        step = ff.parallelize(mine, loss, optimizer)
        start = [p.detach().clone() for p in mine.parameters()]
        step(batches(comm.rank, comm.size)[0])
        scheduler.step()
        after = [p.detach().clone() for p in mine.parameters()]
        step(batches(comm.rank, comm.size)[1])  # at a rate of 0
        has_moved = not any(map(torch.equal, start, after))
        return step.optimizer is optimizer, step.plan.dp, has_moved, all(map(torch.equal, after, mine.parameters()))

    assert threads.run(2, body) == [(True, 2, True, True)] * 2


def test_the_step_of_the_page_for_users_of_ddp_trains(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    section = PAGE.read_text(encoding="utf-8").partition("## With one step\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(640, 8, generator=generator)
    scope: dict[str, Any] = {"data": TensorSource(inputs, inputs.square().mean(1, keepdim=True))}
    exec(found[1], scope | {"torch": torch, "nn": nn, "F": F, "ff": ff}, scope)
    assert scope["metrics"].loss < 0.1
    assert scope["step"].optimizer.param_groups[0]["lr"] == scope["scheduler"].get_last_lr()[0] < 1e-2


class Custom(torch.optim.AdamW):
    """A subclass: nobody knows whether class and options say all of it."""


def with_state(mine: nn.Sequential) -> Optimizer:
    optimizer = torch.optim.AdamW(mine.parameters(), lr=0.1)
    mine(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "state": (
        with_state,
        r"has already made steps.* need one without state: .*ff\.parallelize before the optimizer's first step",
    ),
    "subclass": (lambda mine: Custom(mine.parameters()), r"Custom, a subclass of AdamW .*ff\.DistributedOptimizer"),
    "not element-wise": (lambda mine: torch.optim.LBFGS(mine.parameters()), r"LBFGS .*element-wise"),
    "another model's": (lambda _: torch.optim.SGD(model().parameters(), lr=1.0), "4 parameters that are not the model"),
    "a part's": (lambda mine: torch.optim.SGD(mine[2].parameters(), lr=1.0), "2 trainable parameters that are in no"),
    "before a copy": (
        lambda mine: torch.optim.SGD(copy.deepcopy(mine).parameters(), lr=1.0),
        r"an optimizer of model\.parameters\(\) .*made last",
    ),
    "two kinds": (
        lambda mine: Custom([*mine[2].parameters(), nn.Parameter(torch.zeros(1))], lr=float("inf")),
        r"(?s)4 problems.*subclass.*lr = inf.*1 parameters that are not.*2 trainable parameters",
    ),
    "wrapped": (
        lambda mine: ff.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=1.0), mine),
        "a DistributedOptimizer .*the torch optimizer itself",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_instance_that_cannot_be_rebuilt_is_refused_before_ranks_meet(case, monkeypatch):
    make, message = REFUSED[case]
    mine = model()
    given = make(mine)
    before = [p.detach().clone() for p in mine.parameters()]
    monkeypatch.setattr(init, "init_communicator", lambda: pytest.fail("the ranks have met"))
    with pytest.raises(FourfoldError, match=message):
        ff.parallelize(mine, loss, given)
    assert all(map(torch.equal, before, mine.parameters()))


def test_the_state_dict_of_a_steps_optimizer_is_refused_as_it_lacks_the_states():
    def body(comm):
        mine = model()
        optimizer = torch.optim.AdamW(mine.parameters())
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        step = TrainStep(mine, loss, optimizer, plan=Plan(), communicator=comm)
        step(batches(0, 1)[0])
        with pytest.raises(OptimizerError, match=r"try step\.state_dict\(\)"):
            optimizer.state_dict()
        return "exp_avg" in step.state_dict()["optimizer"]["0.weight"], "last_epoch" in scheduler.state_dict()

    assert threads.run(1, body) == [(True, True)]
