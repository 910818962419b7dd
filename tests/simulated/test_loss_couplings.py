"""Laws of small and hidden couplings: samples that interact anywhere, in a value or a gradient, are refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.plan.plan import Plan
from fourfold.proof.loss_check import LossComparison
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import TaskError
from tests.cases import SEED_LOCK

FEATURES, WIDTH, CLASSES, SAMPLES = 4, 6, 3, 8
PLANS = [Plan(dp=2), Plan(dp=2, microbatches=2, zero=3, transport="gloo"), Plan(microbatches=2)]
DTYPES = [torch.float32, torch.bfloat16]
sgd = functools.partial(torch.optim.SGD, lr=0.1)
Mix = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Scores of three classes; `mix` is applied between the two layers. `gate` is zero."""

    def __init__(self, mix: Mix = lambda net, x: x) -> None:
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES), mix
        self.router, self.gate = nn.Linear(WIDTH, 4), nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-4))
        self.chances = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self, torch.tanh(self.first(x)))
        self.chances = self.router(x).softmax(-1)
        return self.second(x + self.gate + 0 * self.scale + 0 * self.chances.sum(-1, keepdim=True))


def net(mix: Mix = lambda net, x: x, dtype: torch.dtype = torch.float32) -> Net:
    with SEED_LOCK:
        torch.manual_seed(5)
        return Net(mix).to(dtype)


def batch(rank: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SAMPLES, FEATURES, generator=generator).to(dtype), torch.arange(SAMPLES) % CLASSES


def plain(model: Net, outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def balanced(model: Net, outputs: Tensor, targets: Tensor) -> Tensor:
    """With 0.001 × the balancing loss of a mixture of experts, over the batch."""
    chosen = F.one_hot(model.chances.argmax(-1), 4).to(outputs)
    return plain(model, outputs, targets) + 1e-3 * 4 * (chosen.mean(0) * model.chances.mean(0)).sum()


def contrastive(model: Net, outputs: Tensor, targets: Tensor) -> Tensor:
    rows = F.normalize(outputs, dim=1)
    return plain(model, outputs, targets) + 1e-5 * (rows @ rows.T).logsumexp(1).mean()


def values(model: Net, outputs: Tensor, targets: Tensor) -> Tensor:
    rows = F.normalize(outputs, dim=1)
    return F.cross_entropy(outputs, targets, reduction="none") + 1e-5 * (rows @ rows.T).logsumexp(1)


LOSSES = {"a balancing loss": balanced, "a contrastive loss": contrastive, "unreduced values": values}


def test_the_message_shows_a_small_difference():
    found = LossComparison(1.25, 1.2500000125, [1, 2], is_comparable=True, is_additive=False)
    for each in (found, found._replace(is_unreduced=True)):
        assert each.problem is not None
        assert "1.25 for" in each.problem.got
        assert "1.25000001 " in each.problem.got


SMALL: dict[str, Mix] = {
    "behind a small scale": lambda net, x: x + net.scale * 1e-2 * (x - x.mean(0)),
    "behind a gate of zero": lambda net, x: x + net.gate * x.mean(0),
    "behind two gates of zero": lambda net, x: x + net.gate * net.gate * x.mean(0),
}


class Centered(torch.autograd.Function):
    """The identity, whose gradient is centered over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0)


def normalized(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def with_activation_hook(net: Net, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(normalized)
    return x


IN_GRADIENT: dict[str, Mix] = {
    "a hook of an activation": with_activation_hook,
    "a custom autograd function": lambda net, x: Centered.apply(x),  # type: ignore[return-value]
    "a mean less itself, detached": lambda net, x: x + x.mean(0) - x.mean(0).detach(),
    "in a checkpoint": lambda net, x: checkpoint(Centered.apply, x, use_reentrant=False),  # type: ignore[return-value]
}


def with_module_hook() -> Net:
    model = net()
    model.first.register_full_backward_hook(lambda module, given, got: tuple((g and None) or g for g in given))
    model.second.register_full_backward_hook(lambda module, given, got: (normalized(given[0]),))
    return model


def dry_run(
    comm: Any, model: nn.Module, plan: Plan, loss: Any = plain, dtype: torch.dtype = torch.float32
) -> TrainStep:
    step = TrainStep(model, functools.partial(loss, model), sgd, plan=plan, communicator=comm, clip=None)
    step.dry_run(batch(comm.rank, dtype), training=True)
    return step


def refused(make: Callable[[], nn.Module], plan: Plan, match: str, loss: Any = plain, **options: Any) -> None:
    def body(comm: Any) -> None:
        with pytest.raises(TaskError, match=match):
            dry_run(comm, make(), plan, loss, **options)

    threads.run(plan.dp, body)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_small_coupling_of_the_loss_is_refused_on_every_rank(kind, plan):
    match = "unreduced loss values with a mean" if kind == "unreduced values" else "a scalar loss"
    refused(net, plan, match, LOSSES[kind])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SMALL)
def test_a_coupling_behind_a_small_scale_or_a_gate_is_refused(kind, dtype):
    for plan in PLANS:
        match = r"a scalar loss|gradients of .* that do not add up"
        refused(lambda: net(SMALL[kind], dtype), plan, match, dtype=dtype)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [*IN_GRADIENT, "a hook of a module"])
def test_samples_that_interact_in_the_gradient_only_are_refused(kind, plan):
    make = with_module_hook if kind not in IN_GRADIENT else functools.partial(net, IN_GRADIENT[kind])
    refused(make, plan, r"gradients of .* that do not add up")


class Similarities(Net):
    """Of each sample to each other one: parts of a batch have fewer columns."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x @ x.T


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_of_similarities_is_refused_by_its_value(plan):
    refused(Similarities, plan, "a scalar loss of", lambda m, o, y: F.cross_entropy(o, torch.arange(len(o))))


def test_a_loss_divided_by_itself_is_refused_for_its_gradient():
    def loss(model: Net, outputs: Tensor, targets: Tensor) -> Tensor:
        value = plain(model, outputs, targets)
        return value / value.detach()

    # Its divisor does not grow with the number of samples; otherwise its gradient would reveal it.
    refused(net, PLANS[0], r"gradients of .* that do not add up|counts are not proportional", loss)


KINKED: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp(max)": lambda mean: mean.clamp(max=100.0),
    "clamp(min)": lambda mean: mean.clamp(min=0.1),
    "flooding": lambda mean: (mean - 0.1).abs() + 0.1,
    "relu of a difference": lambda mean: F.relu(mean - 0.1),
    "minimum": lambda mean: torch.minimum(0.5 * mean, mean.new_tensor(50.0)),
}


@pytest.mark.parametrize("kind", KINKED)
def test_a_mean_through_a_function_with_a_kink_is_refused_before_it_reaches_the_kink(kind):
    match = "a scalar loss of .*, (for outputs of other sizes|once some are learned)"
    refused(net, PLANS[0], match, lambda m, o, y: KINKED[kind](plain(m, o, y)))

    def by_hand(model: Net, outputs: Tensor, targets: Tensor) -> Tensor:
        return KINKED[kind]((outputs - F.one_hot(targets, CLASSES)).square().mean())

    refused(net, PLANS[2], match, by_hand)


MAY_BE_NEGATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gaussian_nll_loss": lambda o, y: F.gaussian_nll_loss(o, y, torch.full_like(o, 0.3)),
    "nll_loss": lambda o, y: F.nll_loss(o, y.argmax(1)),
    "kl_div": lambda o, y: F.kl_div(o, y, reduction="batchmean"),
}


@pytest.mark.parametrize("floor", [F.relu, lambda mean: mean.clamp(min=0.0)], ids=["relu", "clamp"])
@pytest.mark.parametrize("kind", MAY_BE_NEGATIVE)
def test_a_floor_under_a_loss_that_may_be_negative_is_refused(kind, floor):
    def loss(model: Net, outputs: Tensor, targets: Tensor) -> Tensor:
        return floor(MAY_BE_NEGATIVE[kind](outputs, F.one_hot(targets, CLASSES).to(outputs.dtype)))

    refused(net, PLANS[0], "a scalar loss of", loss)


class Clamp(torch.autograd.Function):
    """A backward that looks at one sample at a time, but is not linear in the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-1e-2, 1e-2)


def test_a_backward_that_depends_on_the_size_of_gradients_trains_equal_counts_and_refuses_others() -> None:
    inputs, targets = batch()

    def body(comm: Any) -> None:
        model = net(lambda _, x: Clamp.apply(x), torch.float64)
        step = TrainStep(model, F.cross_entropy, sgd, plan=Plan(dp=2), communicator=comm, same_batches="allow")
        step((inputs.double(), targets))
        before = [p.detach().clone() for p in model.parameters()]
        ignoring = targets.where(torch.arange(SAMPLES) > comm.rank, -100)
        with pytest.raises(TaskError, match=r"changes gradients by their size.* 13 counted elements .* divided by 16"):
            step((inputs.double(), ignoring))
        assert all(map(torch.equal, before, model.parameters()))

    threads.run(2, body)
