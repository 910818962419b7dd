"""Laws of the optimizer's options: the same on every rank, or refused before a weight changes. Ranks are threads."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import DivergenceError, PlanError
from tests.cases import Case, batches, build_step, deviation, local_batch, loss, model, optimizer

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(12, 12, 12), bucket_bytes=1500)


def wrapped(comm: Any, inner: Any) -> DistributedOptimizer:
    made = nn.Linear(3, 2).double()
    return DistributedOptimizer(inner(made.parameters()), made, Plan(dp=comm.size), communicator=comm)


def stepped(comm: Any, inner: Any) -> TrainStep:
    return TrainStep(model("mlp"), loss(CASE), inner, plan=CASE.plan(comm.size), communicator=comm, clip=None)


sgd, adamw = torch.optim.SGD, torch.optim.AdamW
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "class": (functools.partial(sgd, lr=0.1), functools.partial(adamw, lr=0.1), "adamw.AdamW.*torch.optim.sgd.SGD"),
    "lr": (
        functools.partial(sgd, lr=0.1),
        functools.partial(sgd, lr=0.5),
        r"lr = 0\.5; ranks 0 and 2 have .*lr = 0\.1",
    ),
    "betas": (
        functools.partial(adamw, lr=0.1),
        functools.partial(adamw, lr=0.1, betas=(0.5, 0.9)),
        r"betas = \(0\.5, 0\.9\); ranks 0 and 2 have .*betas = \(0\.9, 0\.999\)",
    ),
    "tensor": (
        functools.partial(sgd, lr=torch.tensor(0.5)),
        functools.partial(sgd, lr=torch.tensor(0.25)),
        r"lr = 0\.25; ranks 0 and 2 have .*lr = 0\.5",
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("kind", [stepped, wrapped])
@pytest.mark.parametrize("difference", OTHERS)
def test_ranks_with_different_optimizers_are_refused_when_the_step_is_built(difference, kind):
    first, other, message = OTHERS[difference]

    def body(comm):
        with pytest.raises(PlanError, match=f"rank 1 has .*{message}"):
            kind(comm, other if comm.rank == 1 else first)
        return True

    assert threads.run(3, body) == [True] * 3


def test_all_options_that_differ_are_reported_together():
    def body(comm):
        other = {"lr": 0.5, "momentum": 0.9} if comm.rank else {"lr": 0.1}
        with pytest.raises(PlanError) as caught:
            stepped(comm, functools.partial(sgd, **other))
        return [problem.got for problem in caught.value.problems]

    for problems in threads.run(2, body):
        assert any("lr = 0.1" in got and "lr = 0.5" in got for got in problems)
        assert any("momentum = 0.0" in got and "momentum = 0.9" in got for got in problems)


def test_a_parameter_in_another_group_of_the_wrapped_optimizer_is_refused():
    def body(comm):
        made = nn.Linear(3, 2)
        first, second = made.weight, made.bias
        if comm.rank:
            first, second = second, first
        inner = sgd([{"params": [first]}, {"params": [second]}], lr=0.1)
        with pytest.raises(PlanError, match="rank 0 has the group of weight = 0; rank 1 has the group of weight = 1"):
            DistributedOptimizer(inner, made, Plan(dp=2), communicator=comm)
        return True

    assert threads.run(2, body) == [True, True]


@pytest.mark.filterwarnings("ignore:weights differ:RuntimeWarning")
def test_fused_and_foreach_may_differ_between_ranks():
    """The updates may round differently, so the comparison of weights at most warns."""

    def body(comm):
        how = {"foreach": True} if comm.rank else {"fused": True}
        step = TrainStep(
            model("mlp"), loss(CASE), optimizer(CASE, **how), plan=CASE.plan(2), communicator=comm, clip=None
        )
        for batch in batches(CASE):
            step(local_batch(batch, 2, comm.rank))
            step.check_drift()
        return True

    assert threads.run(2, body) == [True, True]


def test_ranks_with_the_same_update_kernel_may_not_differ_in_a_bit():
    def body(comm):
        made = optimizer(CASE, fused=True)
        step = TrainStep(model("mlp"), loss(CASE), made, plan=CASE.plan(2), communicator=comm, clip=None)
        step.model.get_parameter("first.weight").data[0].mul_(1.0 + 1e-15 * comm.rank)
        step.check_drift()

    with pytest.raises(DivergenceError, match="rank 1 differs from rank 0"):
        threads.run(2, body)


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": 0.5}, r"lr: rank 1 has 0\.5(?!, 0\.01)"),
    "betas": ({"betas": (0.5, 0.9)}, r"betas: rank 1 has \(0\.5, 0\.9\)"),
    "weight_decay": ({"weight_decay": 0.25}, r"weight_decay: rank 1 has 0\.25"),
    "tensor": ({"lr": torch.tensor(0.5)}, r"lr: rank 1 has 0\.5"),
}


@pytest.mark.covering
@pytest.mark.parametrize("how", [{}, {"update": "in_forward"}, {"sync": "local"}, {"zero": 1}, {"transport": "gloo"}])
@pytest.mark.parametrize("change", CHANGED)
def test_options_that_differ_are_found_in_the_same_step_before_a_weight_changes(change, how):
    case = dataclasses.replace(CASE, **({"local_steps": 3} if "sync" in how else {}), **how)
    options, message = CHANGED[change]

    def body(comm):
        step = build_step(case, 3, comm)
        step(local_batch(batches(case)[0], 3, comm.rank))
        step.flush()
        if comm.rank == 1:
            for group in step.optimizer.param_groups:
                group |= options
        before = copy.deepcopy(dict(step.model.named_parameters()))
        with pytest.raises(DivergenceError, match=message) as caught:
            step(local_batch(batches(case)[1], 3, comm.rank))
        assert all(torch.equal(p, before[name]) for name, p in step.model.named_parameters())
        return str(caught.value)

    for text in threads.run(3, body):
        assert "options of the optimizer" in text
        assert "at step 2" in text
        assert "ranks 0 and 2 have" in text


def test_tensors_that_differ_within_a_tuple_are_found():
    def body(comm):
        betas = torch.tensor(0.5), torch.tensor(0.75)
        make = functools.partial(adamw, lr=torch.tensor(0.1), betas=betas, foreach=False, fused=False)
        step = TrainStep(model("mlp"), loss(CASE), make, plan=CASE.plan(2), communicator=comm, clip=None)
        step(local_batch(batches(CASE)[0], 2, comm.rank))
        step.optimizer.param_groups[0]["betas"] = (torch.tensor(0.5), torch.tensor(0.75))  # other objects, equal values
        step(local_batch(batches(CASE)[1], 2, comm.rank))
        if comm.rank:
            step.optimizer.param_groups[0]["betas"][1].fill_(0.25)
        with pytest.raises(DivergenceError, match=r"betas: rank 0 has \(0\.5, 0\.75\); rank 1 has \(0\.5, 0\.25\)"):
            step(local_batch(batches(CASE)[2], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_tensor_option_changed_in_place_is_found(hosts):
    def body(comm):
        make = functools.partial(adamw, lr=torch.tensor(0.1))
        step = TrainStep(model("mlp"), loss(CASE), make, plan=CASE.plan(4), communicator=comm, clip=None)
        step(local_batch(batches(CASE)[0], 4, comm.rank))
        if comm.rank == 3 or (comm.rank == 2 and hosts == 2):
            step.optimizer.param_groups[0]["lr"].fill_(0.25)
        with pytest.raises(DivergenceError, match=rf"lr: .*rank {3 if hosts == 1 else '[23]'} has 0\.25"):
            step(local_batch(batches(CASE)[1], 4, comm.rank))
        return True

    assert threads.run(4, body, hosts=hosts) == [True] * 4


def test_options_too_long_to_show_are_compared_too():
    def body(comm):
        def make(parameters):
            return sgd([{"params": [p], "lr": 0.0123456789 / (1 + n)} for n, p in enumerate(parameters)], lr=0.1)

        big = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(60))).double()
        step = TrainStep(
            big, lambda outputs, targets: outputs.sum(1), make, plan=Plan(dp=2), communicator=comm, clip=None
        )
        batch = torch.ones(2, 2, dtype=torch.float64), torch.zeros(2)
        step(batch)
        step.optimizer.param_groups[59]["lr"] += 0.5 * comm.rank
        with pytest.raises(
            DivergenceError, match=r"options that are too long to show.*rank 0 has \w{8}; rank 1 has \w{8}"
        ):
            step(batch)
        return True

    assert threads.run(2, body) == [True, True]


def test_a_scheduler_on_one_rank_only_is_found():
    def body(comm):
        step = build_step(CASE, 2, comm)
        step.optimizer.zero_grad()
        if comm.rank == 1:
            torch.optim.lr_scheduler.StepLR(step.optimizer, 10)  # the rate is still the same
        with pytest.raises(DivergenceError, match=r"initial_lr: rank 0 has none; rank 1 has 0\.01"):
            step(local_batch(batches(CASE)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


def test_a_scheduler_on_every_rank_trains_as_one_process_does():
    def body(comm):
        step = build_step(CASE, 2, comm)
        schedule = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
        for batch in batches(CASE):
            step(local_batch(batch, 2, comm.rank))
            schedule.step()
        return {name: p.detach().clone() for name, p in step.model.named_parameters()}

    mine = model("mlp")
    reference_optimizer = optimizer(CASE)(mine.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(reference_optimizer, 0.5)
    for inputs, targets in batches(CASE):
        reference_optimizer.zero_grad()
        loss(CASE)(mine(inputs), targets).mean().backward()
        reference_optimizer.step()
        schedule.step()
    for weights in threads.run(2, body):
        assert max((weights[name] - p).abs().max().item() for name, p in mine.named_parameters()) <= TOLERANCE


def test_options_loaded_from_a_state_dict_are_those_compared():
    def body(comm):
        step = build_step(CASE, 2, comm)
        step(local_batch(batches(CASE)[0], 2, comm.rank))
        saved = step.state_dict()
        for group in saved["groups"]:
            group["lr"] = 0.125
        other = build_step(CASE, 2, comm)
        other.load_state_dict(saved)
        other(local_batch(batches(CASE)[1], 2, comm.rank))
        return [group["lr"] for group in other.optimizer.param_groups]

    assert threads.run(2, body) == [[0.125, 0.125]] * 2


def test_wrapped_optimizers_with_different_options_are_found_in_backward():
    def body(comm):
        optimizer = wrapped(comm, functools.partial(sgd, lr=0.1))
        made = optimizer._model
        made(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        before = copy.deepcopy(dict(made.named_parameters()))
        for group in optimizer.param_groups:
            group["lr"] = 0.5 if comm.rank else 0.25
        with pytest.raises(DivergenceError, match=r"lr: rank 0 has 0\.25; rank 1 has 0\.5"):
            made(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        assert all(torch.equal(p, before[name]) for name, p in made.named_parameters())
        return True

    assert threads.run(2, body) == [True, True]


def test_within_join_a_rank_without_data_may_have_older_options():
    def body(comm):
        optimizer = wrapped(comm, functools.partial(sgd, lr=0.1))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer._optimizer, 0.5)
        with optimizer.join():
            for _ in range(1 + 2 * comm.rank):
                optimizer.zero_grad()
                optimizer._model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
                optimizer.step()
                schedule.step()
        return [group["lr"] for group in optimizer.param_groups]

    first, second = threads.run(2, body)
    assert first == second == [0.0125]


def test_equal_options_train_as_one_process_does():
    assert max(threads.run(3, lambda comm: deviation(CASE, 3, comm))) <= TOLERANCE
