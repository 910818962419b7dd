"""Laws of a wrapped optimizer's step: ranks train as one process does, however the step is called.

Ranks are threads; the oracle is plain PyTorch with the whole batch, in float64.
"""

import functools

import pytest
import torch
from torch import Tensor, nn

from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import DivergenceError, TrainingError

STEPS = 4


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return made


def batch(number: int, rank: int | None) -> Tensor:
    """A rank's samples; for None, those of both ranks."""
    generator = torch.Generator().manual_seed(number)
    both = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64) * torch.tensor([0.5, 2.0]).view(2, 1, 1)
    return both.flatten(0, 1) if rank is None else both[rank]


def loss_of(mine: nn.Module, number: int, rank: int | None) -> Tensor:
    return (mine(batch(number, rank)) - 1).square().mean()


def by_closure(mine, optimizer, rank, *, steps=STEPS, value=lambda loss: loss):
    for number in range(steps):

        def closure(number=number):
            optimizer.zero_grad()
            loss = loss_of(mine, number, rank)
            loss.backward()
            return value(loss)

        optimizer.step(closure)


def train_steps(mine, optimizer, rank, *, steps=STEPS):
    for number in range(steps):
        optimizer.zero_grad()
        loss_of(mine, number, rank).backward()
        optimizer.step()


def differences(make, train, **how) -> list[str]:
    """How the weights of two ranks differ from each other, or from plain PyTorch in one process."""

    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(make(mine.parameters()), mine, communicator=comm, **how)
        train(mine, optimizer, comm.rank)
        return [p.detach().clone() for p in mine.parameters()]

    reference = model()
    train(reference, make(reference.parameters()), None)
    first, second = threads.run(2, body)
    found = [] if all(map(torch.equal, first, second)) else ["the ranks differ"]
    difference = max((a - b).abs().max().item() for a, b in zip(first, reference.parameters(), strict=True))
    # A line search compares losses: a difference in rounding grows with every step.
    return found + ([f"{difference:.2g} from one process"] if difference > 1e3 * TOLERANCE else [])


class Polyak(torch.optim.Optimizer):
    """Its step size is the loss."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        length = float(loss) / float(sum(p.grad.square().sum() for p in parameters))
        for parameter in parameters:
            parameter -= min(length, self.param_groups[0]["lr"]) * parameter.grad
        return loss


class Halving(torch.optim.Optimizer):
    """Halves its step until the loss falls; calls the closure for a loss without gradients."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure, *, tries=8):  # type: ignore[override]
        with torch.enable_grad():
            first = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        before, rate = [p.clone() for p in parameters], self.param_groups[0]["lr"]
        for _ in range(tries):
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old - rate * parameter.grad)
            if float(closure(backward=False)) < float(first):
                break
            rate /= 2
        return first


class ScaledSGD(torch.optim.SGD):
    """Calls its parent's step, with an argument that the parent lacks."""

    def step(self, closure=None, *, scale=1.0):  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
        return super().step(closure)


lbfgs_wolfe = functools.partial(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")
lbfgs_tolerance = functools.partial(torch.optim.LBFGS, max_iter=20, tolerance_change=1e-2)


@pytest.mark.parametrize("make", [functools.partial(lbfgs_wolfe, lr=1.0), functools.partial(lbfgs_tolerance, lr=0.5)])
def test_a_line_search_steps_by_the_mean_loss(make):
    assert differences(make, by_closure) == []


@pytest.mark.parametrize("value", [lambda loss: loss, lambda loss: loss.item(), lambda loss: loss.detach().view(1)])
def test_a_custom_optimizer_steps_by_the_mean_loss(value):
    assert differences(functools.partial(Polyak, lr=0.5), functools.partial(by_closure, value=value)) == []


def test_a_closure_gets_the_arguments_that_its_optimizer_passes():
    def train(mine, optimizer, rank):
        for number in range(STEPS):

            def closure(*, backward=True, number=number):
                loss = loss_of(mine, number, rank)
                if backward:
                    optimizer.zero_grad()
                    loss.backward()
                return loss

            optimizer.step(closure, tries=5)

    assert differences(functools.partial(Halving, lr=8.0), train) == []


def test_a_mean_loss_keeps_its_graph():
    class Backward(Polyak):
        @torch.no_grad()
        def step(self, closure):  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
                loss.backward()
            return super().step(lambda: loss)

    def train(mine, optimizer, rank):
        for number in range(STEPS):
            optimizer.zero_grad()
            optimizer.step(functools.partial(loss_of, mine, number, rank))

    assert differences(functools.partial(Backward, lr=0.5), train) == []


def test_torchs_optimizers_return_the_local_loss_of_a_closure():
    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(torch.optim.Adam(mine.parameters()), mine, communicator=comm)
        loss = loss_of(mine, 0, comm.rank).item()

        def closure():
            found = loss_of(mine, 0, comm.rank)
            found.backward()
            return found.item()

        assert optimizer.step(closure) == loss
        return True

    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize("value", [lambda loss: (loss, 1), lambda loss: loss.expand(2), lambda loss: "low"])
def test_a_closure_value_without_a_mean_is_refused_where_the_optimizer_may_use_it(value):
    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(Polyak(mine.parameters(), lr=0.5), mine, communicator=comm)
        with pytest.raises(TrainingError, match=r"a closure that returns .* need one number: Polyak uses its mean"):
            by_closure(mine, optimizer, comm.rank, value=value)
        return True

    assert threads.run(2, body) == [True, True]


def test_an_optimizer_that_steps_by_the_loss_is_refused_within_join():
    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(lbfgs_wolfe(mine.parameters()), mine, communicator=comm)
        with pytest.raises(TrainingError, match=r"LBFGS with a closure, within join\(\)"), optimizer.join():
            by_closure(mine, optimizer, comm.rank, steps=1)
        return True

    assert threads.run(2, body) == [True, True]


def test_after_a_join_block_an_optimizer_that_steps_by_the_loss_gets_the_mean_again():
    def train(mine, optimizer, rank):
        if isinstance(optimizer, DistributedOptimizer):
            with optimizer.join():
                pass
        by_closure(mine, optimizer, rank)

    assert differences(functools.partial(lbfgs_wolfe, lr=1.0), train) == []


def test_a_direct_step_of_the_wrapped_optimizer_equals_one_of_the_wrapper():
    def inner_of(optimizer):
        return getattr(optimizer, "_optimizer", optimizer)

    def train(mine, optimizer, rank):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss_of(mine, number, rank).backward()
            inner_of(optimizer).step()

    assert differences(functools.partial(torch.optim.SGD, lr=0.1), train) == []
    assert differences(functools.partial(ScaledSGD, lr=0.1), train) == []

    def search(mine, optimizer, rank):
        by_closure(mine, inner_of(optimizer), rank)

    assert differences(functools.partial(lbfgs_wolfe, lr=1.0), search) == []


@pytest.mark.covering
@pytest.mark.parametrize("kind", [torch.optim.SGD, ScaledSGD])
@pytest.mark.parametrize("how", ["step", "closure", "keyword", "scaler"])
def test_an_unreduced_gradient_is_refused_in_a_direct_step_too(how, kind):
    def body(comm):
        mine = model()
        inner = kind(mine.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, mine, communicator=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def local():
            with optimizer.no_sync():
                scaler.scale(loss_of(mine, 0, comm.rank)).backward()

        steps = {
            "step": lambda: (local(), inner.step()),
            "closure": lambda: inner.step(local),
            "keyword": lambda: inner.step(closure=local),
            "scaler": lambda: (local(), scaler.step(inner), scaler.update()),
        }
        before = [p.detach().clone() for p in mine.parameters()]
        for _ in range(2):  # an error must leave no state behind
            with pytest.raises(TrainingError, match="not been averaged"):
                steps[how]()
            optimizer.zero_grad()
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        assert all(map(torch.equal, mine.parameters(), before))
        loss_of(mine, 0, comm.rank).backward()
        inner.step()
        local()
        with pytest.raises(TrainingError, match="not been averaged"):
            inner.step()
        return [p.tolist() for p in mine.parameters()]

    first, second = threads.run(2, body)
    assert first == second


def test_a_direct_step_counts_once():
    def body(comm):
        mine = model()
        inner = ScaledSGD(mine.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, mine, communicator=comm)
        for _ in range(1 + comm.rank):
            inner.step()
        with pytest.raises(DivergenceError, match=r"rank 0 is at backward 1 after 1 steps.*after 2 steps"):
            loss_of(mine, 0, comm.rank).backward()
        return optimizer.defaults["lr"]

    assert threads.run(2, body) == [0.1, 0.1]


def test_the_arguments_of_a_step_reach_the_wrapped_optimizer():
    def train(mine, optimizer, rank):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss_of(mine, number, rank).backward()
            optimizer.step(scale=0.25)

    assert differences(functools.partial(ScaledSGD, lr=0.1), train) == []


def test_an_optimizer_that_is_wrapped_again_is_not_checked_by_the_older_wrapper():
    def body(comm):
        mine = model()
        inner = torch.optim.SGD(mine.parameters(), lr=0.1)
        DistributedOptimizer(inner, mine, communicator=comm)
        optimizer = DistributedOptimizer(inner, mine, communicator=comm)
        train_steps(mine, optimizer, comm.rank)
        return [p.tolist() for p in mine.parameters()]

    first, second = threads.run(2, body)
    assert first == second
