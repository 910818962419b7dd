"""Laws of LARS and LAMB: the papers' updates, however parameters are sharded."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fourfold as ff
from fourfold.optim.lars_lamb import begin_update, finish_update
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import OptimizerError, PlanError
from tests.cases import LOSSES, Case, batches, build_step, deviation, local_batch, model, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")

KINDS: list[Any] = [ff.optim.LARS, ff.optim.LAMB]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lars_of_the_paper(w: Tensor, gradients: list[Tensor], rates: list[float]) -> Tensor:
    """Algorithm 1 of arXiv 1708.03888, with m = 0.9, β = 0.1, η = 0.02, element by element."""
    weights, momentum = w.flatten().tolist(), [0.0] * w.numel()
    for gradient, rate in zip(gradients, rates, strict=True):
        g = gradient.flatten().tolist()
        w_norm, g_norm = (math.sqrt(math.fsum(x * x for x in values)) for values in (weights, g))
        local = 0.02 * w_norm / (g_norm + 0.1 * w_norm)
        momentum = [0.9 * v + rate * local * (x + 0.1 * y) for v, x, y in zip(momentum, g, weights, strict=True)]
        weights = [y - v for y, v in zip(weights, momentum, strict=True)]
    return torch.tensor(weights, dtype=torch.float64).view_as(w)


def lamb_of_the_paper(w: Tensor, gradients: list[Tensor], rates: list[float]) -> Tensor:
    """Algorithm 2 of arXiv 1904.00962, with β₁ = 0.9, β₂ = 0.99, λ = 0.1, ε = 1e-6, element by element."""
    weights, m, v = w.flatten().tolist(), [0.0] * w.numel(), [0.0] * w.numel()
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        g = gradient.flatten().tolist()
        m = [0.9 * a + 0.1 * x for a, x in zip(m, g, strict=True)]
        v = [0.99 * a + 0.01 * x * x for a, x in zip(v, g, strict=True)]
        hats = [(a / (1 - 0.9**t), b / (1 - 0.99**t)) for a, b in zip(m, v, strict=True)]
        u = [a / (math.sqrt(b) + 1e-6) + 0.1 * y for (a, b), y in zip(hats, weights, strict=True)]
        ratio = math.sqrt(math.fsum(y * y for y in weights)) / math.sqrt(math.fsum(x * x for x in u))
        weights = [y - rate * ratio * x for x, y in zip(u, weights, strict=True)]
    return torch.tensor(weights, dtype=torch.float64).view_as(w)


PAPERS: list[tuple[Any, Callable[..., Tensor]]] = [
    (functools.partial(ff.optim.LARS, momentum=0.9, weight_decay=0.1, trust=0.02), lars_of_the_paper),
    (functools.partial(ff.optim.LAMB, betas=(0.9, 0.99), weight_decay=0.1, eps=1e-6), lamb_of_the_paper),
]


@pytest.mark.parametrize(("make", "paper"), PAPERS, ids=["LARS", "LAMB"])
def test_updates_follow_the_papers_with_changing_rates(make: Any, paper: Callable[..., Tensor]) -> None:
    rates = [0.5, 0.1, 0.7, 0.01, 0.3]
    starts = [normal(4, 3, seed=0), normal(5, seed=1, scale=10.0), normal(seed=2)]
    gradients = [[normal(*w.shape, seed=10 * n + i, scale=n + 1.0) for n in range(5)] for i, w in enumerate(starts)]
    parameters = [nn.Parameter(w.clone()) for w in starts]
    optimizer = make(parameters, lr=rates[0])
    for number, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own[number].clone()
        optimizer.step()
    for parameter, start, own in zip(parameters, starts, gradients, strict=True):
        expected = paper(start, own, rates)
        assert (expected - start).abs().max() > 0.01
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["weight", "gradient"])
def test_the_trust_ratio_of_a_zero_norm_is_one(kind: Any, which: str) -> None:
    # Without decay, an update with ratio 1 equals that of a group with adapt=False.
    def move(*, adapt: bool) -> Tensor:
        weight = nn.Parameter(torch.zeros(3) if which == "weight" else torch.tensor([3.0, 0.0, 4.0]))
        weight.grad = torch.zeros(3) if which == "gradient" else torch.tensor([1.0, 2.0, -2.0])
        kind([weight], lr=0.5, weight_decay=0.0, adapt=adapt).step()
        return weight.detach()

    assert torch.equal(move(adapt=True), move(adapt=False))
    assert move(adapt=True).isfinite().all()
    assert which == "gradient" or move(adapt=True).abs().min() > 0.1


def test_a_group_without_adaptation_is_updated_as_by_torchs_own_optimizer() -> None:
    ours, theirs = (nn.Parameter(normal(6, seed=3)) for _ in range(2))
    pairs = [
        (ff.optim.LAMB([ours], lr=0.1, weight_decay=0.0, adapt=False), torch.optim.Adam([theirs], lr=0.1, eps=1e-6)),
        (ff.optim.LARS([ours], lr=0.1, weight_decay=0.3, adapt=False), None),
    ]
    pairs[1] = (pairs[1][0], torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.3))
    for mine, plain in pairs:
        for number in range(4):
            ours.grad, theirs.grad = (normal(6, seed=number) for _ in range(2))
            mine.step()
            plain.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@settings(max_examples=20)
@given(kind=st.sampled_from(KINDS), cuts=st.sets(st.integers(1, 22)), skip=st.booleans())
def test_an_update_does_not_depend_on_how_a_parameter_is_sharded(kind: Any, cuts: set[int], skip: bool) -> None:
    whole = [nn.Parameter(normal(16, seed=0)), nn.Parameter(normal(7, seed=1, scale=5.0))]
    flat = torch.cat([w.detach() for w in whole])
    bounds = sorted({0, 16, 23} | cuts)
    shards = [nn.Parameter(flat[a:b].clone()) for a, b in itertools.pairwise(bounds)]
    owners = [int(a >= 16) for a in bounds[:-1]]
    one, many = (kind(each, lr=0.3, weight_decay=0.1) for each in (whole, shards))
    for number in range(3):
        gradient = normal(23, seed=5 + number)
        for parameter, part in zip(whole, gradient.split([16, 7]), strict=True):
            parameter.grad = part.clone()
        for shard, (a, b) in zip(shards, itertools.pairwise(bounds), strict=True):
            shard.grad = gradient[a:b].clone()
        if skip and number == 1:
            whole[1].grad = None
            for shard, owner in zip(shards, owners, strict=True):
                shard.grad = shard.grad if owner == 0 else None
        one.step()
        with torch.no_grad():
            begun = begin_update(many, owners, num_parameters=2)
            finish_update(begun, begun.squared_norms)
    torch.testing.assert_close(torch.cat([*shards]), torch.cat([*whole]), rtol=0, atol=1e-12)


def test_norms_of_two_byte_weights_do_not_overflow() -> None:
    weight = nn.Parameter(torch.full((4096,), 3e3, dtype=torch.float16))  # its square is 9e6, above the largest float16
    weight.grad = torch.full_like(weight, 1e-3)
    ff.optim.LARS([weight], lr=1.0, trust=0.01, momentum=0.0).step()
    torch.testing.assert_close(weight.detach().float(), torch.full((4096,), 2970.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_group_and_invalid_options_are_refused(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    for empty in ([], [nn.Parameter(torch.ones(0, 3))]):
        with pytest.raises(OptimizerError, match=f"{kind.__name__} on an empty group"):
            kind([{"params": [weight]}, {"params": empty}], lr=1.0)
    with pytest.raises(OptimizerError) as caught:
        kind([weight], lr=-1.0, weight_decay=-1.0)
    assert [problem.got for problem in caught.value.problems] == ["lr = -1.0", "weight_decay = -1.0"]
    with pytest.raises(OptimizerError, match="below 1"):
        kind([weight], **({"momentum": 1.0} if kind is ff.optim.LARS else {"betas": (0.9, 1.0)}))
    assert kind((p for p in [weight]), lr=1.0).param_groups[0]["params"] == [weight]


# ---- on several ranks


@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_parameter_without_gradient_is_not_updated(optimizer: str, zero: int) -> None:
    case = Case(model="unused", unused="allow", optimizer=optimizer, zero=zero, clip=0.05)
    assert max(threads.run(2, lambda comm: deviation(case, 2, comm))) <= TOLERANCE


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
@pytest.mark.parametrize(("zero", "loaded_zero"), [(0, 0), (0, 1), (2, 0), (1, 2)])
def test_a_state_dict_loads_on_another_mesh(optimizer: str, zero: int, loaded_zero: int) -> None:
    case = Case(batch_sizes=(12, 12, 12, 12), optimizer=optimizer, bucket_bytes=1500, zero=zero)

    def train_first_half(comm: Any) -> dict[str, Any]:
        step = build_step(case, 3, comm)
        for batch in batches(case)[:2]:
            step(local_batch(batch, 3, step.dp_index))
        return step.state_dict()

    state = threads.run(3, train_first_half)[0]

    def resume(comm: Any) -> dict[str, Tensor]:
        step = build_step(dataclasses.replace(case, zero=loaded_zero), 2, comm)
        step.load_state_dict(state)
        return train_step(case, step, skip=2).weights

    def whole(comm: Any) -> dict[str, Tensor]:
        return train_step(case, build_step(case, 1, comm)).weights

    (expected,) = threads.run(1, whole)
    for weights in threads.run(2, resume):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
def test_an_update_in_backward_of_a_parameter_shard_is_refused(optimizer: str) -> None:
    case = Case(optimizer=optimizer, zero=1, update="in_backward")
    with pytest.raises(
        PlanError, match=f'"in_backward" with {optimizer} at zero = 1   need the norms of whole parameters'
    ):
        threads.run(2, lambda comm: build_step(case, 2, comm))
    threads.run(1, lambda comm: build_step(case, 1, comm))


def test_an_empty_group_is_refused_by_the_step_too() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        return ff.optim.LARS([{"params": list(parameters)}, {"params": []}], lr=1.0)

    def body(comm: Any) -> None:
        TrainStep(model("mlp"), LOSSES["values"], groups, plan=Plan(), communicator=comm, clip=None)

    with pytest.raises(OptimizerError, match="LARS on an empty group"):
        threads.run(1, body)
