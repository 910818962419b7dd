"""Laws of the context axis's dry run: it finds tokens that interact, even if weights or forward hide it."""

import functools
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.axes.context.attach.check import ContextDryRun, DryRunResult
from fourfold.axes.context.attach.losses import gradient_sum_problem
from fourfold.axes.context.attach.token_shards import token_shards
from fourfold.axes.context.rules.layout import ContextSpec
from fourfold.plan.plan import Plan
from fourfold.proof.checks import (
    SEQUENCE_CHECKS,
    STRICTEST_SEQUENCE_CHECK,
    WEAKEST_SEQUENCE_CHECK,
    MemoryFit,
)
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import TaskError

LENGTH, WIDTH = 16, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Body(nn.Module):
    """Embeddings of tokens and positions, attention with a layer before and after it, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.norm, self.head = Attention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.before(self.tokens(tokens) + self.places(positions))
        return self.head(self.after(x + self.attention(self.norm(x))))


# ---- mixing behind a weight --------------------------------------------------------------------------


class SmallScale(Body):
    """A convolution along the tokens behind a scale, as in LayerScale."""

    def __init__(self, scale: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Parameter(torch.full(shape, scale))

    def before(self, x: Tensor) -> Tensor:
        return x + self.scale * self.conv(x.transpose(1, 2)).transpose(1, 2)


class ClosedGate(Body):
    """a · attention + (1 − a) · the mean over all tokens."""

    def __init__(self, gate: float = 1.0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(gate))

    def after(self, x: Tensor) -> Tensor:
        return self.gate * x + (1 - self.gate) * x.mean(1, keepdim=True)


class ClosedSigmoid(ClosedGate):
    def after(self, x: Tensor) -> Tensor:
        return x + self.gate.sigmoid() * x.cumsum(1)


class SmallConstant(Body):
    """A buffer is a constant: it keeps its value, in float64."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1e-6))

    def after(self, x: Tensor) -> Tensor:
        return x + self.scale * x.roll(1, 1)


class Counting(Body):
    """Each forward in training counts, in a buffer and in an attribute, and scales by the count."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.steps = 0

    def before(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.steps += 1
        return x * (self.count + self.steps)


class InTraining(Body):
    """Tokens are shifted, and their gradients centred, in training mode alone."""

    def __init__(self, is_in_gradient: bool) -> None:
        super().__init__()
        self.dropout, self.is_in_gradient = nn.Dropout(0.5), is_in_gradient

    def after(self, x: Tensor) -> Tensor:
        if self.training and self.is_in_gradient:
            m = x.mean(1, keepdim=True)
            return self.dropout(x + m - m.detach())
        return self.dropout(x + F.pad(x, (0, 0, 1, -1)) if self.training else x)


WEIGHTS = {
    "LayerScale's start": (functools.partial(SmallScale, 1e-4), torch.float32),
    "a small scale": (functools.partial(SmallScale, 1e-6), torch.float64),
    "a small vector": (functools.partial(SmallScale, 1e-6, (WIDTH,)), torch.float32),
    "a small scale with dims of 1": (functools.partial(SmallScale, 1e-6, (1, 1, WIDTH)), torch.float32),
    "a scale of 0": (functools.partial(SmallScale, 0.0), torch.bfloat16),
    "a closed gate": (ClosedGate, torch.float32),
    "a closed sigmoid": (functools.partial(ClosedSigmoid, -60.0), torch.float32),
    "a small constant": (SmallConstant, torch.float32),
}


FITS = MemoryFit()


def dry_run(model: nn.Module, *, cp: int = 2, ring: str = "zigzag", fits: MemoryFit = FITS) -> list[DryRunResult]:
    """The result of each rank's dry run."""
    torch.manual_seed(0)
    inputs = {"tokens": torch.randint(0, 50, (2, LENGTH)), "positions": torch.arange(LENGTH).expand(2, LENGTH)}
    return [
        ContextDryRun(model, inputs, token_shards(ContextSpec(cp, ring), LENGTH)[i], memory_fit=fits).run()
        for i in range(cp)
    ]


def sums_problem(model: nn.Module, results: list[DryRunResult]):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    gradients = [each.grad_projections for each in results if each.grad_projections is not None]
    assert len(gradients) == len(results)
    return gradient_sum_problem(names, gradients)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_mixing_behind_a_small_weight_or_a_closed_gate_is_refused(kind):
    make, dtype = WEIGHTS[kind]
    torch.manual_seed(1)
    for each in dry_run(make().to(dtype)):
        (problem,) = each.problems
        assert "depend on other ranks' tokens" in problem.got
        assert each.config == STRICTEST_SEQUENCE_CHECK


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_model_without_mixing_passes_in_float64_whatever_its_dtype(cp, dtype):
    torch.manual_seed(1)
    model = Body().to(dtype)
    results = dry_run(model, cp=cp)
    assert [(each.problems, each.num_calls, each.config, each.fallback_reason) for each in results] == [
        ([], 1, STRICTEST_SEQUENCE_CHECK, "")
    ] * cp
    assert {each.outputs.dtype for each in results} == {dtype}
    assert sums_problem(model, results) is None


# ---- mixing in the gradient alone --------------------------------------------------------------------


class Centred(torch.autograd.Function):
    """The identity; its backward subtracts the mean over the tokens."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(1, keepdim=True)


class MeanWeight(torch.autograd.Function):
    """x · w; its backward gives the weight the mean over the tokens, not the sum."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).mean((0, 1))


def normalized(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm(dim=1, keepdim=True)


class InFunction(Body):
    def before(self, x: Tensor) -> Tensor:
        return Centred.apply(x)  # pyright: ignore[reportReturnType]


class AfterAttention(Body):
    def after(self, x: Tensor) -> Tensor:
        return Centred.apply(x)  # pyright: ignore[reportReturnType]


class InHook(Body):
    def after(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(normalized)
        return x


class InHookOfQueries(Body):
    """A hook on the inputs of attention: the gradients that attention itself returns stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention.qkv.register_full_backward_pre_hook(lambda module, gradients: (normalized(gradients[0]),))


class InHookOfEmbedding(Body):
    def __init__(self) -> None:
        super().__init__()
        self.places.register_forward_hook(self._hooked)

    @staticmethod
    def _hooked(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(normalized)


class Detached(Body):
    def before(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return x + (mean - mean.detach())


class OfWeightAlone(Body):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def before(self, x: Tensor) -> Tensor:
        return MeanWeight.apply(x, self.scale)  # pyright: ignore[reportReturnType]


GRADIENTS = {
    "function": InFunction,
    "function after attention": AfterAttention,
    "hook": InHook,
    "hook of queries": InHookOfQueries,
    "hook of an embedding": InHookOfEmbedding,
    "detached": Detached,
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_mixing_in_the_gradient_alone_is_refused(kind):
    torch.manual_seed(1)
    for each in dry_run(GRADIENTS[kind]()):
        (problem,) = each.problems
        assert "gradients of the output of" in problem.got
        assert "in backward too" in problem.need


def test_mixing_in_the_gradient_of_one_weight_is_found_in_the_sum_over_the_ranks():
    torch.manual_seed(1)
    model = OfWeightAlone()
    results = dry_run(model)
    assert not any(each.problems for each in results)
    problem = sums_problem(model, results)
    assert problem is not None
    assert "gradients of scale that do not add up" in problem.got


@pytest.mark.parametrize("is_in_gradient", [False, True])
def test_mixing_in_training_mode_alone_is_refused_and_dropout_is_not(is_in_gradient):
    model = InTraining(is_in_gradient)
    assert all("other ranks' tokens" in each.problems[0].got for each in dry_run(model))
    assert not any(each.problems for each in dry_run(model.eval()))
    counting = Counting()
    assert not any(each.problems for each in dry_run(counting))
    assert (counting.count, counting.steps) == (0, 0)


@pytest.mark.parametrize("make", [OfWeightAlone, Detached, ClosedGate])
def test_a_step_is_refused_on_every_rank_before_a_weight_changes(make):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")

    def body(comm):
        with SEEDING, torch.random.fork_rng([]):
            torch.manual_seed(1)
            model = make()
        sgd = functools.partial(torch.optim.SGD, lr=1.0)
        step = TrainStep(model, loss, sgd, plan=Plan(cp=2), communicator=comm, clip=None)
        before = [p.detach().clone() for p in model.parameters()]
        tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 50
        inputs = {"tokens": tokens, "positions": torch.arange(LENGTH).expand(2, LENGTH)}
        with pytest.raises(TaskError, match=r"gradients of .* that do not add up|depend on other ranks' tokens"):
            step((inputs, tokens))
        return all(map(torch.equal, before, model.parameters()))

    assert threads.run(2, body) == [True, True]


SEEDING = threading.Lock()


# ---- what must pass ----------------------------------------------------------------------------------


class Checkpointed(Body):
    """Norms in float32, in a checkpoint, which recomputes them in backward."""

    def __init__(self, *, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.reentrant, self.whole = reentrant, whole
        self.inner = nn.ModuleList([Attention(), Attention()])

    def _norm(self, x: Tensor) -> Tensor:
        return x + F.layer_norm(x.float(), (WIDTH,)).to(x.dtype)

    def _layer(self, attention: nn.Module, x: Tensor) -> Tensor:
        return self._norm(x) + (attention(x) if self.whole else 0.0)

    def before(self, x: Tensor) -> Tensor:
        for attention in self.inner:
            x = checkpoint(self._layer, attention, x, use_reentrant=self.reentrant)
        return x


class Logarithmic(Body):
    """Weights that must be positive, and one that is used as 1 − p."""

    def __init__(self, *, near: bool) -> None:
        super().__init__()
        self.temperature, self.p = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.1))
        self.near = near

    def after(self, x: Tensor) -> Tensor:
        x = x * self.temperature.log() + self.temperature.sqrt()
        return x * (self.p.sub(1.0).neg() - 0.7).log() if self.near else x


class Keys(Body):
    """A bias of keys has only rounding as gradient: it adds the same amount to all scores of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.attention.qkv(x).chunk(3, dim=-1))
        k = k + self.shift.view(2, 1, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Frozen(Body):
    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.attention.requires_grad_(False)
        self.places.requires_grad_(False)


class Imaginary(Body):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.linspace(0, 3, WIDTH)))

    def after(self, x: Tensor) -> Tensor:
        return (x * self.turn).real + (x * self.turn).imag


class PlainTensor(Body):
    """A constant that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.randn(WIDTH, WIDTH)

    def after(self, x: Tensor) -> Tensor:
        return x @ self.constant


class InPlace(Body):
    def after(self, x: Tensor) -> Tensor:
        y = self.attention(x)
        y += x
        return y.mul_(2.0)


PASSING = {
    **{
        f"checkpoint {reentrant} {whole}": functools.partial(Checkpointed, reentrant=reentrant, whole=whole)
        for reentrant in (False, True)
        for whole in (False, True)
    },
    "logarithm": functools.partial(Logarithmic, near=False),
    "keys": Keys,
    "frozen": Frozen,
    "imaginary": Imaginary,
    "in place": InPlace,
    "plain tensor": PlainTensor,
}


@pytest.mark.parametrize("kind", PASSING)
def test_models_without_mixing_pass(kind):
    torch.manual_seed(1)
    model = PASSING[kind]()
    results = dry_run(model)
    assert [(each.problems, each.config, each.fallback_reason) for each in results] == [
        ([], STRICTEST_SEQUENCE_CHECK, "")
    ] * 2
    assert sums_problem(model, results) is None


# ---- where float64 or random weights are unavailable ----------------------------------------------------


def test_weights_near_the_models_own_are_used_if_random_ones_give_nonfinite_results():
    torch.manual_seed(1)
    results = dry_run(Logarithmic(near=True))
    assert {(each.config, tuple(each.problems)) for each in results} == {(SEQUENCE_CHECKS[1], ())}
    assert "not finite" in results[0].fallback_reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fits", "config"),
    [(MemoryFit(fits_float64=False), SEQUENCE_CHECKS[2]), (MemoryFit(False, False), WEAKEST_SEQUENCE_CHECK)],
)
def test_without_enough_memory_the_models_dtype_is_used_and_reported(fits, config, dtype):
    torch.manual_seed(1)
    model = Body().to(dtype)
    results = dry_run(model, fits=fits)
    assert [(each.problems, each.config) for each in results] == [([], config)] * 2
    assert all("do not fit into memory" in each.fallback_reason for each in results)
    refused = dry_run(SmallScale(0.5 if config == WEAKEST_SEQUENCE_CHECK else 0.0).to(dtype), fits=fits)
    assert all(each.problems for each in refused)


class OnlyFloat32(Body):
    """An operation without a kernel for float64."""

    def after(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("no kernel for float64")
        return x


def test_an_operation_without_float64_is_checked_in_its_own_dtype_and_this_is_logged(caplog):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")

    def body(comm):
        sgd = functools.partial(torch.optim.SGD, lr=0.0)
        with SEEDING, torch.random.fork_rng([]):
            torch.manual_seed(1)
            model = OnlyFloat32()
        step = TrainStep(model, loss, sgd, plan=Plan(cp=2), communicator=comm, clip=None)
        tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 50
        step(({"tokens": tokens, "positions": torch.arange(LENGTH).expand(2, LENGTH)}, tokens))

    with caplog.at_level(logging.WARNING, logger="fourfold"):
        threads.run(2, body)
    (record,) = caplog.records
    assert "in the model's own dtype, with random weights instead of in float64" in record.getMessage()
    assert "no kernel for float64" in record.getMessage()


class LearnedMask(Body):
    def before(self, x: Tensor) -> Tensor:
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=x[:, None, None, :, 0]).squeeze(1)


def test_a_mask_that_requires_a_gradient_is_refused():
    (problem,) = dry_run(LearnedMask())[0].problems
    assert "a mask [2, 1, 1, 8] at attention call 1 (LearnedMask) that requires a gradient" in problem.got
    assert problem.attempt == "mask.detach()"


class Features(nn.Module):
    """Inputs of features instead of tokens, with a hook that mixes them."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.attention, self.head, self.mixes = Attention(), nn.Linear(WIDTH, 5), mixes

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        x = features * (1 + positions.unsqueeze(2))
        x = Centred.apply(x) if self.mixes else x
        return self.head(x + self.attention(x))  # pyright: ignore[reportArgumentType, reportOperatorIssue]


@pytest.mark.parametrize("mixes", [False, True])
def test_gradients_of_inputs_that_hold_features_are_compared(mixes):
    torch.manual_seed(1)
    model = Features(mixes=mixes)
    inputs = {"features": torch.randn(2, LENGTH, WIDTH), "positions": torch.arange(LENGTH).expand(2, LENGTH)}
    for index in range(2):
        problems = ContextDryRun(model, inputs, token_shards(ContextSpec(2), LENGTH)[index]).run().problems
        assert ["gradients of the output of the inputs" in problem.got for problem in problems] == [True] * mixes


class Caching(Body):
    """A table that is cached for the next forward, in a dict and as an attribute; and a weight that is held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.newest, self.held = {}, None, [nn.Parameter(torch.ones(WIDTH))]
        self.scale = self.held[0]

    def before(self, x: Tensor) -> Tensor:
        if self.newest is None or len(self.newest) != x.shape[1]:
            self.newest = torch.ones(x.shape[1], 1, dtype=x.dtype)
            self.tables[x.shape[1]] = self.newest
        return x * self.newest * self.tables[x.shape[1]] * self.held[0]


def test_tensors_that_a_model_caches_in_a_dry_run_are_dropped():
    torch.manual_seed(1)
    model = Caching()
    assert [each.problems for each in dry_run(model)] == [[], []]
    assert (model.tables, model.newest) == ({}, None)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []


def test_a_dry_run_leaves_gradients_buffers_and_the_generator_as_they_were():
    torch.manual_seed(1)
    model = SmallConstant()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    torch.manual_seed(2)
    torch.randint(0, 50, (2, LENGTH))
    expected = torch.rand(3)
    torch.manual_seed(2)
    inputs = {"tokens": torch.randint(0, 50, (2, LENGTH)), "positions": torch.arange(LENGTH).expand(2, LENGTH)}
    ContextDryRun(model, inputs, token_shards(ContextSpec(2), LENGTH)[0]).run()
    assert torch.equal(torch.rand(3), expected)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight"}
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.scale.dtype == torch.float32
