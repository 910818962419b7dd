"""Laws of the context axis's dry run: it refuses a model that cannot be sharded by tokens, and names the module."""

import functools
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.utils.checkpoint import checkpoint

from fourfold.axes.context.attach.check import ContextDryRun
from fourfold.axes.context.attach.token_shards import token_shards
from fourfold.axes.context.rules.layout import ContextSpec
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.plan.plan import Plan
from fourfold.step.model_checks import model_problems
from tests.cases import Case, batches
from tests.cases import model as built_in

LENGTH, WIDTH = 16, 24


class Body(nn.Module):
    """Embeddings of tokens and positions, one layer, a head."""

    def __init__(self, layer: nn.Module, *, positions: str = "given") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer, self.head, self.positions = layer, nn.Linear(WIDTH, 50), positions

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.positions == "made":
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.head(self.layer(self.tokens(tokens) + self.places(positions)))


class Attention(nn.Module):
    """Attention of one kind, with a layer before or after it."""

    def __init__(self, kind: str = "plain", around: str = "none") -> None:
        super().__init__()
        self.kind, self.around = kind, around
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gate = nn.Parameter(torch.zeros(()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        if self.kind == "by hand":
            return (q @ k.transpose(2, 3)).softmax(-1) @ v
        if self.kind == "crossed":
            return F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5])
        if self.kind == "imported":
            return imported(q, k, v, is_causal=True)
        if self.kind == "operator":
            return torch.ops.aten.scaled_dot_product_attention(q, k, v)
        if self.kind == "local mask":
            return F.scaled_dot_product_attention(q, k, v, torch.ones(length, length).tril().bool())
        if self.kind == "flat":
            return F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view_as(q)
        if self.kind == "checkpoint":
            return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False, preserve_rng_state=False)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.kind == "causal")

    def forward(self, x: Tensor) -> Tensor:
        if self.around == "convolution":
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.around == "gated convolution":
            x = x + self.gate * self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.around == "recurrence":
            x = self.memory(x)[0]
        if self.around == "cumulative sum":
            x = x + x.cumsum(1)
        if self.around == "centred":
            x = x - x.mean(1, keepdim=True)
        if self.around == "fixed":
            x = x.reshape(-1, LENGTH, WIDTH)
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        out = x + self.attend(q, k, v).transpose(1, 2).flatten(2)
        return out + out.roll(1, 1) if self.around == "rolled after" else out


class Pooled(Body):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions)[:, 0]


class WithLoss(Body):
    """A model that computes its own loss: the mean over all tokens is one of its outputs."""

    def forward(self, tokens: Tensor, positions: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits = super().forward(tokens, positions)
        return logits, 100 + logits.mean()


class TorchAttention(nn.Module):
    """torch's own attention module."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(WIDTH, 2, batch_first=True), options

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, **self.options)[0]


def problems(model: nn.Module, *, cp: int = 2, index: int = 1, ring: str = "zigzag") -> list:
    torch.manual_seed(0)
    inputs = {"tokens": torch.randint(0, 50, (2, LENGTH)), "positions": torch.arange(LENGTH).expand(2, LENGTH)}
    return ContextDryRun(model, inputs, token_shards(ContextSpec(cp, ring), LENGTH)[index]).run().problems


PASSING = {
    **{kind: functools.partial(Attention, kind) for kind in ("plain", "causal", "imported", "operator", "flat")},
    "checkpoint": functools.partial(Attention, "checkpoint"),
    "torch's": functools.partial(TorchAttention, need_weights=False),
    "encoder layer": functools.partial(nn.TransformerEncoderLayer, WIDTH, 2, batch_first=True),
}


@pytest.mark.covering
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("ring", ["zigzag", "plain"])
@pytest.mark.parametrize("kind", PASSING)
def test_a_model_whose_tokens_interact_only_in_attention_passes(kind, ring, cp):
    torch.manual_seed(1)
    for index in range(cp):
        assert problems(Body(PASSING[kind]()), cp=cp, index=index, ring=ring) == []


def test_the_built_in_model_passes():
    model = built_in("lm")
    inputs, _ = batches(Case(model="lm", batch_sizes=(2,)))[0]
    for index in range(4):
        result = ContextDryRun(model, inputs, token_shards(ContextSpec(4), 16)[index]).run()
        assert (result.problems, result.num_calls) == ([], 2)


REFUSED = {
    "by hand": (Body, Attention, {"kind": "by hand"}, r"hand-written attention at layer \(softmax over"),
    "weights requested": (Body, TorchAttention, {}, r"layer.attention.*need_weights=True.*try need_weights=False"),
    "local mask": (Body, Attention, {"kind": "local mask"}, r"a mask \[8, 8\].*is_causal=True"),
    "convolution": (Body, Attention, {"around": "convolution"}, r"first in layer.conv \(Conv1d\)"),
    "gate": (Body, Attention, {"around": "gated convolution"}, r"first in layer.conv \(Conv1d\)"),
    "recurrence": (Body, Attention, {"around": "recurrence"}, r"first in layer.memory \(LSTM\)"),
    "sum": (Body, Attention, {"around": "cumulative sum"}, r"q of attention call 1 \(layer\) depend"),
    "mean": (Body, Attention, {"around": "centred"}, r"q of attention call 1 \(layer\) depend"),
    "fixed length": (
        Body,
        Attention,
        {"around": "fixed"},
        r"q of attention call 1 \(layer\): 16 long for 16 tokens, 16 for 8",
    ),
    "after attention": (Body, Attention, {"around": "rolled after"}, r"the outputs depend.*first in head"),
    "one output": (Pooled, Attention, {}, r"an output \[2, 50\] that is neither per token nor the same on every rank"),
    "a mean": (WithLoss, Attention, {}, r"an output \[\] that is neither per token nor the same on every rank"),
    "no attention": (Body, nn.Identity, {}, r"never calls scaled_dot_product_attention"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tokens_that_interact_elsewhere_are_refused_with_the_module(kind):
    body, layer, options, message = REFUSED[kind]
    torch.manual_seed(1)
    (problem,) = problems(body(layer(**options)))
    text = " need ".join(problem[:2]) + " try " + problem.attempt
    assert re.search(message, text), text


def test_keys_of_another_length_are_refused_as_cross_attention():
    (problem,) = problems(Body(Attention("crossed")))
    assert "cross-attention at attention call 1 (layer" in problem.got
    assert f"{LENGTH} queries, 5 keys" in problem.got


def test_an_intercepted_call_has_the_dtypes_of_autocast():
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind(0)
    mask, intercepted = torch.zeros(4, 4), []

    def target(call: AttentionCall) -> Tensor:
        intercepted.extend(tensor.dtype for tensor in (call.q, call.k, call.v, call.mask) if tensor is not None)
        return call.run_sdpa()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v.bfloat16(), mask)
        with intercept_attention(target):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v.bfloat16(), mask), expected)
    assert intercepted == [torch.bfloat16] * 4


def test_what_stands_in_for_a_module_is_passed_over(monkeypatch):
    class StandIn:  # as Cython's, it has attributes and no name
        def __init__(self) -> None:
            self.attention = F.scaled_dot_product_attention

    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "a_stand_in", stand_in)  # type: ignore[arg-type]
    q = torch.randn(1, 1, 2, 4)
    calls: list[AttentionCall] = []
    with intercept_attention(lambda call: (calls.append(call), call.run_sdpa())[1]):
        stand_in.attention(q, q, q)
    assert len(calls) == 1


def test_positions_that_the_model_computes_itself_are_refused():
    torch.manual_seed(1)
    (problem,) = problems(Body(Attention(), positions="made"))
    assert "does not use positions" in problem.got
    assert "arange" in problem.attempt


def test_a_dry_run_does_not_change_the_model():
    torch.manual_seed(1)
    model = Body(Attention("plain", "gated convolution"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.layer.eval()
    problems(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert not model.layer.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_each_call_is_intercepted_once_and_only_inside():
    x = torch.randn(1, 2, 4, 8)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    tokens = torch.randn(1, 4, 16)
    intercepted = []

    def target(call: AttentionCall) -> Tensor:
        intercepted.append(call)
        return F.scaled_dot_product_attention(call.q, call.k, call.v)  # a handler's own calls go to torch

    original = F.scaled_dot_product_attention
    with intercept_attention(target):
        F.scaled_dot_product_attention(x, x, x)
        imported(x, x, x)
        torch.ops.aten.scaled_dot_product_attention.default(x, x, x)
        attention(tokens, tokens, tokens, need_weights=False)
        assert len(intercepted) == 4
    assert F.scaled_dot_product_attention is original
    original(x, x, x)
    assert len(intercepted) == 4


def test_a_dropout_in_a_checkpoint_is_overridden_in_both_forwards():
    x, intercepted = torch.randn(4, 4, requires_grad=True), []

    def replacement(func, *args, **kwargs) -> Tensor:
        intercepted.append(func)
        return func(*args, **kwargs)

    original = F.dropout
    with intercept_attention(AttentionCall.run_sdpa, overrides={original: replacement}):
        checkpoint(lambda t: F.dropout(t, 0.5).sin(), x, use_reentrant=False).sum().backward()
    assert intercepted == [original, original]
    assert F.dropout is original


@pytest.mark.parametrize("name", ["module", "imported"])
def test_the_second_forward_of_a_checkpoint_is_intercepted(name):
    functions = {"module": lambda t: F.scaled_dot_product_attention(t, t, t), "imported": lambda t: imported(t, t, t)}
    x, intercepted = torch.randn(1, 2, 4, 8, requires_grad=True), []

    def target(call: AttentionCall) -> Tensor:
        intercepted.append(call)
        return call.run_sdpa()

    with intercept_attention(target):
        checkpoint(functions[name], x, use_reentrant=False).sum().backward()
    assert len(intercepted) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fields", [{"cp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}, {"update": "in_forward"}])
def test_compiled_code_is_refused_where_it_hides_calls(fields):
    body = Body(Attention())
    assert not model_problems(body, Plan(**fields))
    body.layer.compile()
    assert [problem.got for problem in model_problems(body, Plan(**fields)) if "at layer" in problem.got]
    assert not model_problems(body, Plan(dp=2, zero=2))
