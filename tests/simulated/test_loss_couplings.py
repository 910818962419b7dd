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
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.torch_kit.tensor_tree import tree_map
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


@pytest.mark.covering
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


@pytest.mark.covering
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [*IN_GRADIENT, "a hook of a module"])
def test_samples_that_interact_in_the_gradient_only_are_refused(kind, plan):
    make = with_module_hook if kind not in IN_GRADIENT else functools.partial(net, IN_GRADIENT[kind])
    refused(make, plan, r"gradients of .* that do not add up")


BY_ELEMENTS = [
    functools.partial(F.mse_loss, reduction="none"),
    F.l1_loss,
    lambda outputs, targets: ((outputs - targets) ** 2).mean(),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", BY_ELEMENTS)
def test_outputs_and_targets_that_broadcast_are_named_with_their_shapes(loss):
    def body(comm: Any) -> None:
        plan, generator = Plan(dp=2), torch.Generator().manual_seed(comm.rank)
        step = TrainStep(nn.Linear(4, 1), loss, sgd, plan=plan, communicator=comm, clip=None)
        numbers = torch.randn(6, 5, generator=generator)
        got = r"outputs \[6, 1\] and targets \[6\], which broadcast to \[6, 6\]: .* try outputs\.view_as\(targets\)"
        with pytest.raises(TaskError, match=got):
            step.dry_run((numbers[:, :4], numbers[:, 4]), training=True)

    threads.run(2, body)


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


class Counting(nn.Module):
    """Scores of eight classes. `counts`: divided by how many samples of a forward are of the same kind."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(FEATURES, 8), counts

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return self.linear(x) / torch.bincount(kinds)[kinds, None] if self.counts else self.linear(x)


def class_weights(targets: Tensor) -> Tensor:
    return 1 / (torch.bincount(targets, minlength=8) + 1.0)


PASSES_IN_EQUAL_PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "values with weights of classes": lambda o, t: F.cross_entropy(o, t, weight=class_weights(t), reduction="none"),
    "torch's mean with weights of classes": lambda o, t: F.cross_entropy(o, t, weight=class_weights(t)),
    "values divided by counts": lambda o, t: F.cross_entropy(o, t, reduction="none") / torch.bincount(t)[t],
    "a value for each output": lambda o, t: (o - F.one_hot(t, 8)).square().mean(0),
    "a model that counts": lambda o, t: F.cross_entropy(o, t, reduction="none"),
    "a model that counts, and torch's mean": F.cross_entropy,
    "a model that counts, and a mean": lambda o, t: (o - F.one_hot(t, 8)).square().mean(),
}


@pytest.mark.covering
@pytest.mark.parametrize("plan", [Plan(microbatches=4), Plan(microbatches=8), Plan(dp=2), Plan(dp=2, microbatches=2)])
@pytest.mark.parametrize("kind", PASSES_IN_EQUAL_PARTS)
def test_a_coupling_that_few_samples_of_different_classes_hide_is_refused(kind: str, plan: Plan) -> None:
    inputs, targets = batch()[0], torch.arange(SAMPLES)

    def body(comm: Any) -> None:
        with SEED_LOCK:
            torch.manual_seed(0)
            model = Counting("a model" in kind)
        step = TrainStep(model, PASSES_IN_EQUAL_PARTS[kind], sgd, plan=plan, communicator=comm)
        given = tree_map(({"x": inputs, "kinds": targets}, targets), lambda t: t.chunk(plan.dp)[step.dp_index])
        with pytest.raises(TaskError, match="for the same samples in parts of"):
            step.dry_run(given, training=True)

    threads.run(plan.dp, body)


class Clamp(torch.autograd.Function):
    """A backward that looks at one sample at a time, but is not linear in the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-1e-2, 1e-2)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Clamp.apply(x)  # type: ignore[return-value]


def clamp_sum(p: Tensor) -> None:
    if p.grad is not None:
        p.grad.clamp_(-1e-2, 1e-2)


def clamping(kind: str) -> lm.LanguageModel:
    """A language model with a clamp of gradients: of an activation, of a weight, or of a weight's sum."""
    with SEED_LOCK:
        torch.manual_seed(5)
        model = lm.LanguageModel(width=16, layers=2, heads=2, kv_heads=2).double()
    weight = model.blocks[1].get_parameter("mlp.down.weight")
    if kind == "an activation":
        model.blocks[1].dropout = Clamped()
    elif kind == "a weight":
        weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    else:
        weight.register_post_accumulate_grad_hook(clamp_sum)
    return model


def texts() -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches with other numbers of samples, and of targets."""
    found, generator = list[tuple[dict[str, Tensor], Tensor]](), torch.Generator().manual_seed(3)
    for samples, length in ((8, 16), (4, 16), (8, 8), (4, 16)):
        tokens = torch.randint(0, 32, (samples, length), generator=generator)
        found.append(({"tokens": tokens, "positions": torch.arange(length).expand(samples, -1)}, tokens.roll(-1, 1)))
    return found


WHOLE = [Plan(), Plan(update="in_forward"), Plan(update="in_backward")]
CLAMPS = [(plan, kind) for plan in WHOLE for kind in ("an activation", "a weight", "a weight's sum")] + [
    (plan, "an activation")
    for plan in (Plan(tp=2), Plan(pp=2, microbatches=1), Plan(dp=2), Plan(dp=2, zero=3), Plan(cp=2), Plan(dp=2, cp=2))
]


@pytest.mark.parametrize(("plan", "kind"), CLAMPS, ids=str)
def test_a_clamp_of_gradients_finds_them_in_their_size_on_one_device(plan: Plan, kind: str) -> None:
    expected = oracle.train(clamping(kind), lm.loss, sgd, texts())

    def body(comm: Any) -> float:
        step = TrainStep(clamping(kind), lm.loss, sgd, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES, clip=None)
        losses = [step(tree_map(each, lambda t: t.chunk(plan.dp)[step.dp_index])).loss for each in texts()]
        step.flush()
        return oracle.deviation(oracle.snapshot(step, losses, []), expected)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


def test_a_clamp_of_gradients_trains_microbatches_of_equal_counts_and_refuses_others() -> None:
    inputs, targets = batch()

    def body(comm: Any) -> None:
        model = net(lambda _, x: Clamp.apply(x), torch.float64)
        plan = Plan(dp=2, microbatches=2)
        step = TrainStep(model, F.cross_entropy, sgd, plan=plan, communicator=comm, same_batches="allow")
        step((inputs.double(), targets))
        before = [p.detach().clone() for p in model.parameters()]
        ignoring = targets.where(torch.arange(SAMPLES) > comm.rank, -100)
        with pytest.raises(TaskError, match=r"changes gradients by their size.* 13 counted elements .* divided by 16"):
            step((inputs.double(), ignoring))
        assert all(map(torch.equal, before, model.parameters()))

    threads.run(2, body)


def of_two_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """Values of some samples only: of a microbatch perhaps one, in shape [1]."""
    return F.cross_entropy(outputs, targets, reduction="none")[targets > 0]


def in_shape_1(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets).reshape(1)


@pytest.mark.covering
@pytest.mark.parametrize(
    "plan", [Plan(microbatches=2), Plan(microbatches=4), Plan(dp=2), Plan(microbatches=8)], ids=str
)
@pytest.mark.parametrize("loss", [of_two_classes, in_shape_1])
def test_one_value_that_is_left_of_several_is_no_scalar(loss: Any, plan: Plan) -> None:
    def model() -> nn.Module:
        with SEED_LOCK:
            torch.manual_seed(0)
            return nn.Linear(6, 3, dtype=torch.float64)

    generators = [torch.Generator().manual_seed(seed) for seed in range(4)]
    batches = [
        (torch.randn(8, 6, generator=each, dtype=torch.float64), torch.randint(0, 3, (8,), generator=each))
        for each in generators
    ]
    alone, expected = model(), list[float]()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3)
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(alone(inputs), targets).mean()
        value.backward()
        optimizer.step()
        expected.append(value.item())

    def train(comm: Any) -> list[float]:
        step = TrainStep(model(), loss, functools.partial(torch.optim.SGD, lr=0.3), plan=plan, communicator=comm)
        half = slice(4 * comm.rank, 4 * comm.rank + 8 // plan.dp)
        return [step((inputs[half], targets[half])).loss for inputs, targets in batches]

    assert threads.run(plan.dp, train)[0] == pytest.approx(expected, rel=1e-9)
