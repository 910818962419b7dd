"""The dry run of the tensor axis: right rules pass, wrong ones are refused by name before a weight changes."""

import contextlib
import functools
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.tensor.attach.check import TensorCheck, num_bytes_without_held
from fourfold.axes.tensor.work.layers import SplitLayer
from fourfold.model.rank_dropout import DrawSlices, FoundDraw
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.plan.plan import Plan
from fourfold.planner.task_facts.fake_memory import PeakMemory
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.words.errors import TaskError
from tests.cases import SEED_LOCK
from tests.simulated.test_tensor_axis import HUGGING_FACE, hugging_face, language_model, logits_loss, texts, tokens

SGD = functools.partial(torch.optim.SGD, lr=0.1)
TIME_LIMIT_SECONDS = 10


def make_step(model: nn.Module, loss: Any, comm: Any, plan: Plan, rules: Any = None) -> TrainStep:
    return TrainStep(model, loss, SGD, plan=plan, communicator=comm, tensor=rules or {})


@pytest.fixture(params=["held", "not held"])
def whole_weights(request, monkeypatch):
    """Whether the whole model fits into memory, or its weights take nearly none. Their values are the same."""
    if request.param == "not held":
        monkeypatch.setattr(TensorCheck, "memory_fits", lambda self: [False, False, True, True])
    return request.param


# ---- right rules ------------------------------------------------------------------------------------


@pytest.fixture
def finished(monkeypatch):
    """By rank thread: the dry runs that have compared something and passed."""
    passed: list[int] = []
    judge = TensorCheck.judge

    def counted(self, reports, *, training):
        learned = judge(self, reports, training=training)
        assert not any(report["unavailable"] or report["fallback"] for report in reports)
        passed.append(sum(report["has_samples"] for report in reports))
        return learned

    monkeypatch.setattr(TensorCheck, "judge", counted)
    return passed


@pytest.mark.parametrize("fields", [{"tp": 2}, {"tp": 4}, {"tp": 2, "cp": 2}, {"tp": 2, "dp": 2, "zero": 3}], ids=str)
def test_the_language_model_passes_once(fields, whole_weights, finished):
    plan = Plan(**fields)

    def body(comm):
        step = make_step(language_model(), lm.loss, comm, plan, lm.TENSOR_RULES)
        for batch in tokens(4):
            step(batch)

    threads.run(plan.mesh.size, body)
    assert finished == [plan.mesh.size] * plan.mesh.size


@pytest.mark.covering
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_transformers_pass(kind, tp, whole_weights, finished):
    def body(comm):
        make_step(hugging_face(kind), logits_loss, comm, Plan(tp=tp)).dry_run(texts()[0])

    threads.run(tp, body)
    assert finished == [tp] * tp


def test_a_model_in_half_precision_passes_in_float64(finished):
    def body(comm):
        model = language_model().float()
        make_step(model, lm.loss, comm, Plan(tp=2, precision="bf16"), lm.TENSOR_RULES).dry_run(tokens(2)[0])

    threads.run(2, body)
    assert finished == [2, 2]


def test_it_leaves_no_trace(whole_weights, finished):
    def body(comm):
        step = make_step(hugging_face("llama"), logits_loss, comm, Plan(tp=2))
        before = {name: value.clone() for name, value in step.model.state_dict().items()}
        state = torch.get_rng_state()
        step.dry_run(texts()[0])
        assert all(p.grad is None or not p.grad.any() for p in step.model.parameters())
        assert torch.equal(state, torch.get_rng_state())
        return all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())

    assert all(threads.run(2, body))


class Caching(nn.Module):
    """It keeps what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x


def test_modules_keep_nothing_of_it(finished):
    def body(comm):
        step = make_step(make_net(mlp_with(Caching)), squared, comm, Plan(tp=2), MLP_RULES)
        step.dry_run(features())
        return step.model.get_submodule("blocks.0.middle").kept is None

    assert all(threads.run(2, body))


# ---- wrong rules ------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 16), middle or nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)))


class Attention(nn.Module):
    """One whose heads may be of any size: a missing count is no error of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, *middles: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(middles)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class SoftmaxOfFeatures(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class FusedMLP(nn.Module):
    """Two parts in one layer: a rank has features of both, so its outputs are no slice of the whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 32), SoftmaxOfFeatures(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(self.middle(gate * up))


class Gain(nn.Module):
    """A weight of one number, which fits features that are split too."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class KeepsLargest(nn.Module):
    """It scales its features by the largest one of the forward before, as a buffer or as a number; or only keeps it."""

    largest: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.number = kind, 1.0
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scale, largest = self.number if self.kind == "number" else self.largest.clone(), x.detach().abs().max()
        if self.kind == "number":
            self.number = largest.item()
        else:
            self.largest.copy_(largest)
        return torch.tanh(x if self.kind == "unread buffer" else x / scale)


class Penalized(MLP):
    """It uses the weight of a layer itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.mean()


class FewerOutputs(nn.Module):
    """It multiplies its input by a weight of its own, and returns features that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).mean(-1, keepdim=True)


class Sharing(nn.Module):
    """Two layers with one weight, and a softmax of split features behind the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP(SoftmaxOfFeatures())
        self.second.up.weight = self.first.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


FIRST_RULES = {"blocks.0.up": "column", "blocks.0.down": "row"}
MLP_RULES = {"blocks.*.up": "column", "blocks.*.down": "row"}
ATTENTION_RULES = {"blocks.*.q": "column", "blocks.*.k": "column", "blocks.*.v": "column", "blocks.*.out": "row"}


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean((1, 2))


def features(num_samples: int = 4) -> Any:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_samples, 3, 8, generator=generator), torch.zeros(num_samples, 3, 8)


def make_net(*middles: Any) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(1)
        return Net(*(make() for make in middles))


def mlp_with(middle: Any) -> Any:
    return lambda: MLP(middle())


WRONG: dict[str, tuple[Any, dict[str, str], str]] = {
    "a column without its row": (
        (MLP,),
        {"blocks.*.up": "column"},
        r"blocks\.0\.down \(Linear\) gets split features, \[2, 3, 8\] of \[2, 3, 16\].*"
        r'"blocks\.\*\.down" = "row", or no rule for "blocks\.\*\.up"',
    ),
    "a row whose input is whole": (
        (MLP,),
        {"blocks.*.down": "row"},
        r'blocks\.0\.down \(Linear\) is "row", and its input \[2, 3, 16\] is whole.*"column" for the layer',
    ),
    "heads without their count": (
        (Attention,),
        ATTENTION_RULES,
        r"between blocks\.0\.v and blocks\.0\.out is not the whole model's.*other rules for \"blocks\.\*\.v\"",
    ),
    "softmax over split features": (
        (MLP, mlp_with(SoftmaxOfFeatures)),
        MLP_RULES,
        r"blocks\.1\.middle \(SoftmaxOfFeatures\) returns outputs that are not the whole model's.*no softmax",
    ),
    "softmax behind a fused layer": (
        (FusedMLP,),
        {"blocks.*.up": "column(2)", "blocks.*.down": "row"},
        r"blocks\.0\.middle \(SoftmaxOfFeatures\) returns outputs that are not the whole model's",
    ),
    "a mean of split features": (
        (FewerOutputs,),
        {"blocks.*.up": "column"},
        r"blocks\.0 \(FewerOutputs\) returns outputs that are not the whole model's",
    ),
    "a norm of split features": (
        (mlp_with(lambda: nn.LayerNorm(16)),),
        MLP_RULES,
        r"blocks\.0\.middle \(LayerNorm\) gets split features, \[2, 3, 8\] of \[2, 3, 16\]",
    ),
    "a norm without weights": (
        (mlp_with(lambda: nn.Sequential(nn.GELU(), nn.Unflatten(-1, (1, -1)), SoftmaxOfFeatures(), nn.Flatten(-2))),),
        MLP_RULES,
        r"blocks\.0\.middle\.2 \(SoftmaxOfFeatures\) returns outputs",
    ),
    "a weight used outside of its layer": (
        (Penalized,),
        MLP_RULES,
        r'blocks\.0\.up\.weight is used outside of its layer.*no rule for "blocks\.\*\.up"',
    ),
    "softmax behind a layer whose weight another one has too": (
        (Sharing,),
        {"blocks.*.*.up": "column", "blocks.*.*.down": "row"},
        r"blocks\.0\.second\.middle \(SoftmaxOfFeatures\) returns outputs that are not the whole model's",
    ),
    "a gradient without its sum": (
        (mlp_with(Gain), mlp_with(Gain)),
        MLP_RULES,
        r"gradient of blocks\.1\.middle\.gain is missing its sum over the 2 tensor ranks \(1 more like it\).*"
        r'"blocks\.\*\.middle" = "replicated"',
    ),
    "a buffer of split features": (
        (mlp_with(functools.partial(KeepsLargest, "buffer")),),
        MLP_RULES,
        r"forward keeps blocks\.0\.middle\.largest, and it is not what the whole model keeps",
    ),
    "a buffer of split features that nothing reads": (
        (mlp_with(functools.partial(KeepsLargest, "unread buffer")),),
        MLP_RULES,
        r"forward keeps blocks\.0\.middle\.largest, and it is not what the whole model keeps",
    ),
    "a number of split features": (
        (mlp_with(functools.partial(KeepsLargest, "number")),),
        MLP_RULES,
        "forward keeps something that the next forward reads, and it is not what the whole model keeps",
    ),
    "a gradient summed twice": (
        (MLP, Gain),
        {**FIRST_RULES, "blocks.1": "replicated"},
        r"gradient of blocks\.1\.gain is 2 times the whole model's.*no rule that makes blocks\.1 \"replicated\"",
    ),
}


def refusal(make: Any, loss: Any, batch: Any, rules: Any, tp: int = 2, **fields: Any) -> str:
    """The message that all ranks raise, before a weight changes."""

    def body(comm):
        step = make_step(make(), loss, comm, Plan(tp=tp, **fields), rules)
        before = [p.clone() for p in step.model.parameters()]
        with pytest.raises(TaskError) as raised:
            step(batch)
        assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
        return str(raised.value)

    messages = set(threads.run(Plan(tp=tp, **fields).mesh.size, body))
    assert len(messages) == 1, messages
    return messages.pop()


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_refused_by_name(case):
    middles, rules, message = WRONG[case]
    found = refusal(functools.partial(make_net, *middles), squared, features(), rules)
    assert re.search(message, found), found


def roots(outputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of a root is not finite at 0, nor the root of a negative number."""
    return (0 * outputs).sqrt().mean((1, 2)) + squared(outputs, targets)


def test_wrong_rules_are_refused_though_the_loss_has_no_finite_gradients():
    found = refusal(functools.partial(make_net, MLP), roots, features(), {"blocks.*.up": "column"})
    assert "blocks.0.down (Linear) gets split features" in found


def test_a_batch_that_gives_no_finite_numbers_shows_nothing_and_the_next_one_is_checked():
    def body(comm):
        step = make_step(make_net(MLP), squared, comm, Plan(tp=2), {"blocks.*.up": "column"})
        inputs, targets = features()
        step.dry_run((inputs * float("nan"), targets))
        with pytest.raises(TaskError, match="gets split features"):
            step.dry_run((inputs, targets))

    threads.run(2, body)


def watched(model: nn.Module, term: Any) -> Any:
    """A loss that reads the features between a column and a row layer, which a hook keeps."""
    kept: list[Any] = []
    up = model.get_submodule("blocks.0.up")
    up.register_forward_hook(lambda module, args, output: kept.append(output))
    return lambda outputs, targets: squared(outputs, targets) + term(kept[-1].square().mean((1, 2)))


def penalized(model: nn.Module, term: Any) -> Any:
    return lambda outputs, targets: squared(outputs, targets) + term(model.get_parameter("blocks.0.up.weight").norm())


def anchored(model: nn.Module, term: Any) -> Any:
    anchor = model.get_parameter("blocks.0.up.weight").detach().clone()
    return lambda o, t: squared(o, t) + term((model.get_parameter("blocks.0.up.weight") - anchor).square().sum())


def balanced(model: nn.Module, term: Any) -> Any:
    """A loss that reads what forward keeps in a module, and does not have before."""
    block = model.get_submodule("blocks.0")
    block.get_submodule("up").register_forward_hook(
        lambda module, args, out: setattr(module, "kept", out.square().mean())
    )
    return lambda outputs, targets: squared(outputs, targets) + term(model.get_submodule("blocks.0.up").kept)


TERMS: dict[str, tuple[Any, Any, str]] = {
    "features": (watched, lambda x: x, "a loss that is not the whole model's, though the outputs are"),
    "a weight": (penalized, lambda x: x, "a loss that is not the whole model's, though the outputs are"),
    "an attribute": (balanced, lambda x: x, "a loss that is not the whole model's, though the outputs are"),
    "shapes": (anchored, lambda x: x, "a loss that fails where the model is cut .*though the outputs are"),
    "the gradient of features": (watched, lambda x: x - x.detach(), "the gradient of blocks.0.up.* is not"),
    "the gradient of a weight": (penalized, lambda x: x - x.detach(), "the gradient of blocks.0.up.* is not"),
}


@pytest.mark.parametrize("kind", TERMS)
def test_a_loss_of_what_is_split_is_refused(kind):
    losses, (make_loss, term, message) = threading.local(), TERMS[kind]

    def make() -> nn.Module:
        model = make_net(MLP)
        losses.loss = make_loss(model, term)
        return model

    found = refusal(make, lambda outputs, targets: losses.loss(outputs, targets), features(), MLP_RULES)
    assert re.search(message, found), found


@pytest.mark.parametrize(("hook", "is_refused"), [
    (lambda g: g / (1 + g.norm()), True), (lambda g: g * torch.ones(16, 1), True), (lambda g: 0.5 * g, False),
    (None, True),
])  # fmt: skip
def test_a_hook_of_a_split_weight_must_do_the_same_with_each_part(hook, is_refused):
    def make() -> nn.Module:
        model = make_net(MLP)
        if hook is None:
            torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda grads: None)
        else:
            model.get_parameter("blocks.0.up.weight").register_hook(hook)
        return model

    if is_refused:
        assert "a hook of blocks.0.up.weight" in refusal(make, squared, features(), MLP_RULES)
        return
    losses = threads.run(2, lambda comm: make_step(make(), squared, comm, Plan(tp=2), MLP_RULES)(features()).loss)
    assert losses[0] == losses[1]


QWEN3_RULES = {
    "model.embed_tokens": "vocabulary",
    "model.layers.*.self_attn.q_proj": "column(heads=4)",
    "model.layers.*.self_attn.k_proj": "column(kv_heads=2)",
    "model.layers.*.self_attn.v_proj": "column(kv_heads=2)",
    "model.layers.*.self_attn.o_proj": "row(heads=4)",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "vocabulary",
}


def test_norms_of_heads_without_replicated_are_refused_by_name():
    found = refusal(lambda: hugging_face("qwen3"), logits_loss, texts()[0], QWEN3_RULES)
    assert "gradient of model.layers.1.self_attn.k_norm.weight is missing its sum" in found
    assert '"model.layers.*.self_attn.k_norm" = "replicated"' in found


def test_a_refusal_on_one_data_rank_reaches_all():
    found = refusal(functools.partial(make_net, Penalized), squared, features(1), MLP_RULES, dp=2)
    assert "blocks.0.up.weight is used outside" in found


# ---- dropout ----------------------------------------------------------------------------------------


class DroppedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        p = 0.5 if self.training else 0.0
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2))


class Reversed(nn.Module):
    """It drops features that no rank has in their order."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.flip(-1), 0.1, self.training).flip(-1)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


HEADS_RULES = {"blocks.*.q": "column(heads)", "blocks.*.k": "column(heads)", "blocks.*.v": "column(heads)"}
HEADS_RULES["blocks.*.out"] = "row(heads)"
SPLIT_DRAWS = {
    "noise": (Noise, r"randn_like in blocks\.0\.middle \(Noise\)"),
    "a function that is not replaced": (lambda: nn.AlphaDropout(0.1), r"alpha_dropout = 0\.1 in blocks\.0\.middle"),
    "no slice": (Reversed, r"dropout = 0\.1 in blocks\.0\.middle \(Reversed\)"),
}


@pytest.mark.parametrize("case", SPLIT_DRAWS)
def test_random_numbers_that_cannot_be_drawn_by_slice_are_refused(case):
    middle, message = SPLIT_DRAWS[case]
    found = refusal(functools.partial(make_net, mlp_with(middle)), squared, features(), MLP_RULES)
    assert re.search(rf"tp = 2 and {message}.*, on features that are split.*try dropout = 0 in .*, or tp = 1", found), (
        found
    )


def test_an_evaluation_that_has_passed_tells_nothing_of_training():
    def body(comm):
        step = make_step(make_net(mlp_with(Reversed)), squared, comm, Plan(tp=2), MLP_RULES)
        step.model.eval()
        step.evaluate(features())
        step.model.train()
        with pytest.raises(TaskError, match=r"dropout = 0\.1 in blocks\.0\.middle"):
            step(features())

    threads.run(2, body)


DROPPED = {
    "features": (mlp_with(lambda: nn.Dropout(0.5)), MLP_RULES, "blocks.0.middle", [(0, 8)], [(8, 16)]),
    "attention": (DroppedAttention, HEADS_RULES, "blocks.0", [(0, 2)], [(2, 4)]),
}


@pytest.mark.covering
@pytest.mark.parametrize("case", DROPPED)
@pytest.mark.parametrize("another_intercepts", [False, True])
def test_a_dropout_learns_its_slice(case, another_intercepts, finished, monkeypatch):
    """Also while another thread has replaced torch's functions, as a failed rank of a world of threads may leave it."""
    make, rules, module, *slices = DROPPED[case]
    learned: list[list[FoundDraw]] = []
    learn = DrawSlices.learn
    monkeypatch.setattr(
        DrawSlices, "learn", lambda self, draws, **more: (learned.append(draws), learn(self, draws, **more))
    )

    def body(comm):
        num_samples = 2 if comm.rank < 2 else 0  # of ranks without samples, others find it
        make_step(make_net(make), squared, comm, Plan(dp=2, tp=2), rules).dry_run(features(num_samples))

    with intercept_attention(AttentionCall.run_sdpa) if another_intercepts else contextlib.nullcontext():
        threads.run(4, body)
    found = [(draw.module, list(draw.part.ranges)) for (draw,) in learned if draw.part is not None]
    assert sorted(found) == [(module, each) for each in sorted(slices * 2)]


def test_dropout_of_whole_features_passes(finished):
    def body(comm):
        make_step(make_net(MLP, lambda: nn.Dropout(0.5)), squared, comm, Plan(tp=2), FIRST_RULES).dry_run(features())

    threads.run(2, body)
    assert finished == [2, 2]


# ---- failures of one rank ---------------------------------------------------------------------------


class FailingGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("backward")


class Failing(nn.Module):
    """What lies between the layers of an MLP: on one rank, it raises."""

    def __init__(self, where: str, comm: Any) -> None:
        super().__init__()
        self.where, self._is_here = where, comm.rank == 1

    def forward(self, x: Tensor) -> Tensor:
        if self._is_here and (self.where == "whole" or (self.where == "cut" and x.shape[-1] < 16)):
            raise KeyError(self.where)
        fails_later = self._is_here and self.where == "backward" and x.shape[-1] < 16
        return FailingGrad.apply(x) if fails_later else x

    def __deepcopy__(self, memo: Any) -> "Failing":
        return self


FAILURES = {
    "whole": (KeyError, "whole", "rank 1 failed on its first batch: KeyError: 'whole'"),
    "cut": (
        TaskError,
        "blocks.1.middle (Failing) gets split features, [2, 3, 4] of [2, 3, 16], and fails: 'cut'",
        None,
    ),
    "backward": (TaskError, "the model (Net) fails where the model is cut: 'backward'", None),
}


@pytest.mark.parametrize("where", FAILURES)
def test_no_rank_waits_for_one_that_fails(where, monkeypatch):
    monkeypatch.setattr(threads, "TIME_LIMIT_SECONDS", TIME_LIMIT_SECONDS)
    error, own, others = FAILURES[where]

    def body(comm):
        model = make_net(MLP, lambda: MLP(Failing(where, comm)))
        step = make_step(model, squared, comm, Plan(tp=4), MLP_RULES)
        expected, text = (error, own) if comm.rank == 1 else (TaskError, others or own)
        with pytest.raises(expected, match=re.escape(text)):
            step(features())

    begin = time.monotonic()
    threads.run(4, body)
    assert time.monotonic() - begin < TIME_LIMIT_SECONDS


class RankBranch(nn.Module):
    """It calls a row layer that the other ranks do not call."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.up, self.down, self.rank = nn.Linear(8, 16), nn.Linear(16, 8), comm.rank

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        return y + self.down(self.up(y)) if self.rank else y


class ExtraSum(MLP):
    """One rank, where the layers are split, sums something that the others do not."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.rank = comm.rank

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.rank and isinstance(self.down, SplitLayer):
            self.down.region.leave(torch.ones(3))
        return y


def test_ranks_whose_sums_pair_up_wrongly_are_refused(monkeypatch):
    monkeypatch.setattr(threads, "TIME_LIMIT_SECONDS", TIME_LIMIT_SECONDS)

    def body(comm):
        step = make_step(make_net(lambda: RankBranch(comm)), squared, comm, Plan(tp=2), MLP_RULES)
        with pytest.raises(TaskError) as raised:
            step(features())
        return str(raised.value)

    first, second = threads.run(2, body)
    assert first == second
    assert "blocks.0.down" in first


def test_ranks_that_sum_different_tensors_are_refused(monkeypatch):
    monkeypatch.setattr(threads, "TIME_LIMIT_SECONDS", TIME_LIMIT_SECONDS)

    def body(comm):
        step = make_step(make_net(lambda: ExtraSum(comm)), squared, comm, Plan(tp=2), MLP_RULES)
        with pytest.raises(TaskError, match="tensor ranks that sum different tensors in one forward or backward"):
            step(features())

    threads.run(2, body)


def test_a_model_that_cannot_be_copied_is_refused():
    def body(comm):
        model = make_net(MLP)
        vars(model)["lock"] = threading.Lock()
        with pytest.raises(TaskError, match=r"a model that cannot be copied: cannot pickle '_thread.lock'"):
            make_step(model, squared, comm, Plan(tp=2), MLP_RULES)

    threads.run(2, body)


def test_what_cannot_be_compared_is_said(caplog):
    def body(comm):
        model = make_net(mlp_with(NotFinite))
        make_step(model, squared, comm, Plan(tp=2), MLP_RULES).dry_run(features())

    threads.run(2, body)
    (record,) = caplog.records
    assert "the dry run of tp = 2 compared nothing, so the tensor rules are unchecked: outputs that" in record.message


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0


def test_a_model_that_writes_into_a_weight_is_compared_where_whole_weights_are_held(whole_weights, caplog):
    def body(comm):
        make_step(make_net(Clamped), squared, comm, Plan(tp=2), MLP_RULES).dry_run(features())

    threads.run(2, body)
    assert ["the model writes into a weight" in record.message for record in caplog.records] == (
        [] if whole_weights == "held" else [True]
    )


class Clamped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.5, 0.5)
        return super().forward(x)


# ---- memory -----------------------------------------------------------------------------------------


def test_whole_weights_take_nearly_no_memory_where_they_do_not_fit(whole_weights, finished, monkeypatch):
    """The peak, with the activations of one short sample, is within what the check of memory counts."""
    inspect, counted = TensorCheck.inspect, []

    def recorded(self, *args, **options):
        counted.append(num_bytes_without_held(self._axis)[0])
        return inspect(self, *args, **options)

    monkeypatch.setattr(TensorCheck, "inspect", recorded)

    def body(comm):
        model = lm.LanguageModel(width=128, layers=6, heads=4, kv_heads=4).double()
        step = make_step(model, lm.loss, comm, Plan(tp=4), lm.TENSOR_RULES)
        with PeakMemory() as memory:
            step.dry_run(tokens(1, length=4)[0])
        return memory.peak_bytes, 8 * sum(p.numel() for p in model.parameters()) * 4

    for peak, whole in threads.run(4, body):
        assert (peak < whole) == (whole_weights == "not held")
        assert whole_weights == "held" or peak <= counted[0]
