"""Laws of the loss check in float64: ordinary models pass, no trace is left, and a fallback is logged."""

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.axes.data.attach import check as first_batch
from fourfold.model.objective import Objective, UserLoss
from fourfold.plan.plan import Plan
from fourfold.proof import loss_check
from fourfold.proof.checks import LOSS_CHECKS, STRICTEST_LOSS_CHECK, MemoryFit
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import TaskError
from tests.cases import SEED_LOCK

LENGTH, WIDTH, CLASSES, SAMPLES = 6, 8, 5, 5
sgd = functools.partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[nn.Module, Any, Tensor], Any]


class Layer(nn.Module):
    """A transformer layer: causal attention and a feed-forward part, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.scale * self.out(attended.transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.last(x)))), 0.1, self.training)


class Gpt(nn.Module):
    """Scores of the next token [samples, tokens, classes]; `run` calls the layers."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Any] = lambda layer, x: layer(x), tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places, self.run = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH), run
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, CLASSES, bias=False)
        nn.init.zeros_(self.head.weight)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


class Kinds(nn.Module):
    """Embeds tokens, applies `change`, and returns scores."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.tokens, self.head, self.change = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES), change
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.change(self, self.tokens(tokens)))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter whose second factor is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def differentiated(model: Any, x: Tensor) -> Tensor:
    """Forces: the gradient of an energy by the inputs."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.requires_grad_()
        energy = torch.tanh(model.inner(x)).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return x + force


def in_half(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def rotated(model: Any, x: Tensor) -> Tensor:
    return (x.to(torch.complex64) * model.phases).real


def conv(model: Any, x: Tensor) -> Tensor:
    return x + model.conv(x.transpose(1, 2)).transpose(1, 2)


def recurrent(model: Any, x: Tensor) -> Tensor:
    return model.rnn(x)[0]


def routed(model: Any, x: Tensor) -> Tensor:
    """A mixture of experts: each token goes to the best one."""
    scores = model.router(x).softmax(-1)
    best = scores.argmax(-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        rows = best == number
        out[rows] = scores[rows][:, number, None] * expert(x[rows])
    return x + out


def rounded(model: Any, x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def convolved(norm: nn.Module) -> nn.Module:
    return Kinds(conv, conv=nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), norm, nn.ReLU()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": Gpt,
    "tied": lambda: Gpt(tied=True),
    "bfloat16": lambda: Gpt().bfloat16(),
    "checkpointed": lambda: Gpt(functools.partial(checkpoint, use_reentrant=False)),
    "checkpointed, reentrant": lambda: Gpt(functools.partial(checkpoint, use_reentrant=True)),
    "autocast": lambda: Gpt(in_half),
    "complex": lambda: Kinds(rotated, phases=nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))),
    "group norm": lambda: convolved(nn.GroupNorm(2, WIDTH)),
    "batch norm": lambda: convolved(nn.BatchNorm1d(WIDTH)),
    "a compiled part": lambda: Kinds(lambda m, x: m.inner(x), inner=torch.compile(Adapted(), backend="eager")),
    "an adapter": lambda: Kinds(lambda m, x: m.inner(x), inner=Adapted()),
    "differentiated": lambda: Kinds(differentiated, inner=nn.Linear(WIDTH, 4)),
    "recurrent": lambda: Kinds(recurrent, rnn=nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)),
    "experts": lambda: Kinds(routed, router=nn.Linear(WIDTH, 3), experts=nn.ModuleList([Adapted() for _ in range(3)])),
    "rounded": lambda: Kinds(rounded),
    "a buffer of constants": lambda: Kinds(lambda m, x: x * torch.tensor([0.5, 2.0] * 4)),
    "masked and clamped": lambda: Kinds(lambda m, x: x.masked_fill(x < -1, torch.finfo(x.dtype).min).clamp(-3)),
}


def flat(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.flatten(0, 1), targets.flatten()


def ones(targets: Tensor) -> Tensor:
    return F.one_hot(targets.clamp(min=0), CLASSES) * 0.75 + 0.05


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.25])
MODULE = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone(), label_smoothing=0.1)


def by_loop(outputs: Tensor, targets: Tensor) -> Tensor:
    """Clamped for each sample: no kink in the batch's mean."""
    each = [(o - ones(y)).square().mean().clamp(max=9.0) for o, y in zip(outputs, targets, strict=True)]
    return torch.stack(each).mean()


LOSSES: dict[str, Loss] = {
    "ignoring": lambda m, o, y: F.cross_entropy(*flat(o, y)),
    "smoothed": lambda m, o, y: F.cross_entropy(*flat(o, y), label_smoothing=0.1),
    "class weights": lambda m, o, y: F.cross_entropy(*flat(o.float(), y), weight=CLASS_WEIGHTS),
    "a module": lambda m, o, y: MODULE(*flat(o.float(), y)),
    "soft": lambda m, o, y: F.cross_entropy(o.flatten(0, 1), ones(y).to(o.dtype).flatten(0, 1)),
    "by hand": lambda m, o, y: (o - ones(y)).square().mean(),
    "a floor": lambda m, o, y: F.relu(F.mse_loss(o.float(), ones(y))).clamp(min=0.0),
    "values clamped": lambda m, o, y: F.mse_loss(o.float(), ones(y), reduction="none").clamp(max=0.5).mean(),
    "a loop over samples": lambda m, o, y: by_loop(o.float(), y),
    "a penalty": lambda m, o, y: (
        F.cross_entropy(*flat(o, y)) + 0.1 * sum(p.abs().square().sum() for p in m.parameters())
    ),
    "plus a detached difference": lambda m, o, y: F.cross_entropy(*flat(o, y)) + (o - o.detach()).square().sum(),
    "unreduced": lambda m, o, y: F.cross_entropy(o.transpose(1, 2), y, reduction="none"),
    "a pair": lambda m, o, y: (F.cross_entropy(*flat(o, y), reduction="sum"), (y >= 0).sum()),
}


def made(kind: str) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(2)
        return MODELS[kind]()


def batch(rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = (torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
    targets[torch.rand(SAMPLES, LENGTH, generator=generator) < 0.2] = -100
    return tokens, targets


def trained(comm: Any, kind: str, plan: Plan, loss: str = "ignoring") -> None:
    model = made(kind)
    step = TrainStep(model, functools.partial(LOSSES[loss], model), sgd, plan=plan, communicator=comm, clip=None)
    step(batch(comm.rank))


def plan_of(kind: str, dp: int = 2, **options: Any) -> Plan:
    return Plan(dp=dp, batch_norm="local" if kind == "batch norm" else "error", unused="allow", **options)


@pytest.mark.parametrize("kind", MODELS)
def test_ordinary_models_pass_in_float64(kind, caplog):
    if "compiled" in kind:  # torch says of all threads that they compile while one does
        threads.run(1, lambda comm: trained(comm, kind, plan_of(kind, dp=1, microbatches=2)))
    else:
        threads.run(2, lambda comm: trained(comm, kind, plan_of(kind)))
    if "reentrant" not in kind and "compiled" not in kind:  # these are refused at zero 3
        threads.run(2, lambda comm: trained(comm, kind, plan_of(kind, zero=3, transport="gloo", microbatches=2)))
    assert not [record for record in caplog.records if "dry run of the loss" in record.message]


@pytest.mark.parametrize("loss", LOSSES)
def test_ordinary_losses_pass_in_float64(loss, caplog):
    for kind in ("gpt", "bfloat16"):
        threads.run(2, lambda comm, kind=kind: trained(comm, kind, plan_of(kind, microbatches=2), loss))
    assert not [record for record in caplog.records if "dry run of the loss" in record.message]


def states() -> list[str]:
    return [repr(each) for each in (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state())]


def model_state(model: nn.Module) -> dict[str, Any]:
    """All that a check might change, by name: identities, versions and values."""
    found: dict[str, Any] = {}
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if p.grad is None else (id(p.grad), p.grad._version, p.grad.tolist())
        found[name] = id(p), p.data_ptr(), p._version, p.dtype, p.requires_grad, p.tolist(), grad
        found[name] += len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())
    for name, module in model.named_modules():
        kinds = {key: id(value) if isinstance(value, Tensor) else type(value) for key, value in vars(module).items()}
        found[f"{name}."] = kinds, module.training, [k for k, v in vars(module).items() if "hook" in k and v]
    return found


class Stateful(Gpt):
    """Keeps its last scores, a moving average that is not a buffer, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mean, self.calls = None, torch.zeros(CLASSES), []
        self.always: Tensor
        self.register_buffer("always", torch.ones(CLASSES))
        self.frozen = nn.Parameter(torch.ones(CLASSES), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.scores = super().forward(tokens) * self.always * self.frozen
        self.mean.mul_(0.9).add_(0.1)
        self.calls.append(len(tokens))
        return self.scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory_fit", [MemoryFit(), MemoryFit(fits_float64=False)])
def test_a_check_leaves_the_model_its_gradients_and_all_generators_as_they_were(dtype, memory_fit):
    with SEED_LOCK:
        torch.manual_seed(1)
        model = Stateful().to(dtype)
    fired = []
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
            p.register_hook(lambda gradient: fired.append("hook"))
            p.register_post_accumulate_grad_hook(lambda parameter: fired.append("after"))
    held = [model.tokens.weight, *model.parameters()]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in held)  # not through the model
        return F.cross_entropy(*flat(outputs, targets), weight=CLASS_WEIGHTS.to(dtype)) + 0.01 * penalty

    def body(comm: Any) -> None:
        step = TrainStep(model, loss, sgd, plan=Plan(microbatches=2), communicator=comm, clip=None)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        before, generators, mean = model_state(model), states(), model.mean.clone()
        objective = step.objective
        whole, parts = (batch(), [tuple(t[:2] for t in batch()), tuple(t[2:] for t in batch())])
        verdict = loss_check.check_loss(
            model, objective, whole, parts, memory_fit=memory_fit, device=torch.device("cpu")
        )
        assert verdict.problem is None
        assert verdict.config == str(STRICTEST_LOSS_CHECK if memory_fit.fits_float64 else LOSS_CHECKS[-1])
        assert model_state(model) == before
        assert states() == generators
        assert torch.equal(model.mean, mean)
        assert not model.calls
        assert torch.is_grad_enabled()

    threads.run(1, body)
    assert not fired


def test_without_memory_for_float64_gradients_are_checked_in_the_models_dtype_and_that_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(first_batch, "find_memory_fit", lambda *args, **options: MemoryFit(fits_float64=False))
    caplog.set_level(logging.WARNING)
    threads.run(2, lambda comm: trained(comm, "gpt", plan_of("gpt")))
    (record,) = caplog.records
    assert "in the model's own dtype, with the model's own weights instead of in float64" in record.message
    assert "do not fit into memory" in record.message

    def normalized(comm: Any) -> None:
        model = Gpt()
        model.head.register_full_backward_hook(lambda module, given, got: (given[0] / given[0].norm(),))
        nn.init.ones_(model.head.weight)
        step = TrainStep(
            model, functools.partial(LOSSES["ignoring"], model), sgd, plan=plan_of("gpt"), communicator=comm, clip=None
        )
        with pytest.raises(TaskError, match=r"gradients of .* that do not add up"):
            step(batch(comm.rank))

    threads.run(2, normalized)


def test_a_model_that_fails_in_float64_is_checked_in_its_own_dtype_and_that_is_logged(caplog):
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            if x.dtype == torch.float64:
                raise RuntimeError("not implemented for 'Double'")
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    def body(comm: Any) -> None:
        model = Kinds(lambda m, x: Narrow.apply(x))  # type: ignore[arg-type, return-value]
        step = TrainStep(
            model, functools.partial(LOSSES["ignoring"], model), sgd, plan=Plan(dp=2), communicator=comm, clip=None
        )
        step(batch(comm.rank))

    caplog.set_level(logging.WARNING)
    threads.run(2, body)
    (record,) = caplog.records
    assert "not implemented for 'Double'" in record.message


def test_torchscript_is_not_checked_and_not_changed():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, CLASSES)))
    before = [p.clone() for p in model.parameters()]
    given = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    options = {"memory_fit": MemoryFit(), "device": torch.device("cpu")}
    verdict = loss_check.check_loss(
        model, Objective(UserLoss(F.cross_entropy), is_batch_split=True), given, [given, given], **options
    )
    assert verdict.problem is None
    assert verdict.config is None
    assert "TorchScript" in verdict.fallback_reason
    assert all(map(torch.equal, model.parameters(), before))


def test_a_model_with_parts_in_torchscript_trains_as_in_one_process():
    def made() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, dtype=torch.float64).eval()
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), norm, nn.Tanh())))

    scripted = [made() for _ in range(3)]  # made here: TorchScript cannot be compiled in two threads at once
    given = [(torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 4) for _ in range(3)]

    def body(comm: Any) -> list[Tensor]:
        model = scripted[comm.rank]
        step = TrainStep(model, F.cross_entropy, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        for each in given:
            step(tuple(tensor[comm.rank * 3 :][:3] for tensor in each))
        return [p.detach().clone() for p in model.parameters()]

    got, optimizer = threads.run(2, body), sgd(scripted[2].parameters())
    for inputs, targets in given:
        optimizer.zero_grad()
        F.cross_entropy(scripted[2](inputs), targets).backward()
        optimizer.step()
    for of_rank in got:
        torch.testing.assert_close(of_rank, list(scripted[2].parameters()), rtol=1e-12, atol=1e-12)


def test_a_cause_that_all_checks_have_is_said_once() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise AttributeError("a slip of the pen")

    class Slip(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return Broken.apply(super().forward(input))  # type: ignore[return-value]

    given = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    options = {"memory_fit": MemoryFit(), "device": torch.device("cpu")}
    objective = Objective(UserLoss(F.cross_entropy), is_batch_split=True)
    verdict = loss_check.check_loss(Slip(4, CLASSES), objective, given, [given, given], **options)
    assert verdict.fallback_reason.count("a slip of the pen") == 1


class Counting(nn.Module):
    """Counts its calls in a number of Python, as an annealed loss does."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.calls, self.weight = 0, weight

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.weight * self.calls)


@pytest.mark.parametrize("weight", [0.1, 1e-5])  # the second shows in float64 only
@pytest.mark.parametrize("of_loss", [False, True])
def test_a_number_of_python_that_each_forward_changes_is_named(weight: float, of_loss: bool):
    class Annealed:
        def __init__(self) -> None:
            self.step = 0

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.step += 1
            return F.mse_loss(outputs, targets) * (1 + weight * self.step)

    def refused(comm: Any) -> str:
        body = nn.Linear(3, 2) if of_loss else nn.Sequential(nn.Linear(3, 2), Counting(weight))
        loss = Annealed() if of_loss else F.mse_loss
        step = TrainStep(body, loss, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        rows = torch.arange(12.0).reshape(4, 3) / 12 + comm.rank
        with pytest.raises(TaskError) as caught:
            step((rows, rows[:, :2]))
        return str(caught.value)

    expected = "step of Annealed" if of_loss else "1.calls of Counting"
    assert f"each forward changes {expected}, and the loss depends on it" in threads.run(2, refused)[0]


def test_a_number_that_only_counts_does_not_explain_a_loss_that_is_no_mean():
    def refused(comm: Any) -> str:
        body = nn.Sequential(nn.Linear(3, 2), Counting(0.0))
        step = TrainStep(body, lambda o, t: (o - t).square().sum(), sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        with pytest.raises(TaskError) as caught:
            step((torch.ones(4, 3) + comm.rank, torch.zeros(4, 2)))
        return str(caught.value)

    message = threads.run(2, refused)[0]
    assert "a scalar loss of" in message
    assert "each forward" not in message
