"""Split residuals: a model whose hidden tensors are split over tokens trains as one device does, on every mesh."""

import functools
import weakref
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.axes.tensor.rules.styles import Style
from fourfold.axes.tensor.work.layers import RowLinear, split_layer
from fourfold.axes.tensor.work.split_region import LeaveTokens, SplitRegion
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup
from fourfold.plan.param_spec import TensorShard
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.step.parallelize import preflight
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.saved_tensors import recording_saved
from fourfold.words.errors import PlanError, TaskError
from tests.cases import SEED_LOCK
from tests.simulated.test_tensor_axis import (
    ADAM,
    HUGGING_FACE,
    TOLERANCE,
    deviation,
    hugging_face,
    hugging_face_on_one_device,
    language_model,
    logits_loss,
    one_device,
    texts,
    tokens,
    train,
)


def split_plan(**fields: Any) -> Plan:
    return Plan(sequence_parallel=True, bucket_bytes=8000, **fields)


def language_step(plan: Plan, comm: Any, model: nn.Module | None = None, **options: Any) -> TrainStep:
    options = {"clip": 0.5, "tensor": lm.TENSOR_RULES} | options
    return TrainStep(model or language_model(), lm.loss, ADAM, plan=plan, communicator=comm, **options)


def largest_deviation(plan: Plan, batches: Any, expected: oracle.TrainingResult, make: Any = language_model) -> float:
    def body(comm):
        step = language_step(plan, comm, make())
        return deviation(step, *train(step, batches), expected)

    return max(threads.run(plan.mesh.size, body))


# ---- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [
    {"tp": 2},
    {"tp": 8, "zero": 1},
    {"tp": 2, "cp": 2, "dp": 2, "zero": 3},
    {"tp": 4, "cp": 2, "zero": 2},
    {"tp": 2, "cp": 2, "ring": "gather"},
    {"tp": 2, "dp": 2, "zero": 3, "transport": "gloo"},
    {"tp": 2, "dp": 2, "update": "in_forward", "zero": 3},
    {"tp": 2, "microbatches": 3},
    {"tp": 2, "unused": "allow", "zero": 1},
], ids=str)  # fmt: skip
def test_every_mesh_trains_as_one_device(fields):
    assert largest_deviation(split_plan(**fields), tokens(8), one_device()) <= TOLERANCE


def test_updates_in_backward_are_those_of_one_device():
    expected = oracle.train(language_model(), lm.loss, ADAM, tokens(8))

    def body(comm):
        step = language_step(split_plan(tp=2, dp=2, update="in_backward", zero=2), comm, clip=None)
        return deviation(step, *train(step, tokens(8)), expected)

    assert max(threads.run(4, body)) <= TOLERANCE


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_transformers_train_as_on_one_device(kind):
    fields = {"qwen3": {"dp": 2, "tp": 2, "zero": 3}, "bert": {"tp": 2}}.get(kind, {"tp": 4})
    plan, expected = split_plan(**fields), hugging_face_on_one_device(kind)

    def body(comm):
        step = TrainStep(hugging_face(kind), logits_loss, ADAM, plan=plan, communicator=comm, clip=0.5)
        with Float64Mode():
            return deviation(step, *train(step, texts()), expected)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


@pytest.mark.covering
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_lengths_need_not_divide_and_may_differ_between_batches(length, tp):
    """Some ranks then have fewer tokens, or none."""
    batches = [tokens(4, length=length)[0], tokens(2, length=5)[0], tokens(4, length=length)[1]]
    expected = oracle.train(language_model(), lm.loss, ADAM, batches, clip=0.5)
    assert largest_deviation(split_plan(tp=tp), batches, expected) <= TOLERANCE


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_biases_and_norms_of_ranks_without_tokens_are_summed(kind):
    batches = [({"input_ids": inputs["input_ids"][:, :3]}, targets[:, :3]) for inputs, targets in texts()]
    with Float64Mode():
        expected = oracle.train(hugging_face(kind), logits_loss, ADAM, batches, clip=0.5)

    def body(comm):
        step = TrainStep(hugging_face(kind), logits_loss, ADAM, plan=split_plan(tp=4), communicator=comm, clip=0.5)
        with Float64Mode():
            return deviation(step, *train(step, batches), expected)

    assert max(threads.run(4, body)) <= TOLERANCE


def test_empty_batches():
    inputs, targets = tokens(8)[0]
    none = ({name: each[:0] for name, each in inputs.items()}, targets[:0])

    def body(comm):
        step = language_step(split_plan(tp=2, dp=2), comm)
        metrics = step((inputs, targets) if step.dp_index == 0 else none)
        return deviation(step, [metrics.loss], [metrics.grad_norm], expected)

    expected = oracle.train(language_model(), lm.loss, ADAM, [(inputs, targets)], clip=0.5)
    assert max(threads.run(4, body)) <= TOLERANCE


def test_whole_weights_stay_the_same_bits_on_all_ranks_in_half_precision(without_dry_run):
    def body(comm):
        plan = split_plan(tp=2, dp=2, zero=2, precision="bf16")
        step = language_step(plan, comm, language_model().float(), drift_check=1)
        return train(step, tokens(8, length=7))  # raises DivergenceError where bits differ

    results = threads.run(4, body)
    assert all(each == results[0] for each in results)


# ---- checkpointing of activations -------------------------------------------------------------------


class Checkpointed(lm.Block):
    reentrant: bool

    def forward(self, *args: Tensor) -> Any:  # type: ignore[override]
        return checkpoint(super().forward, *args, use_reentrant=self.reentrant)


class PartlyCheckpointed(lm.Block):
    reentrant: bool

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:  # type: ignore[override]
        options: Any = {"use_reentrant": self.reentrant}
        x = x + cast(Tensor, checkpoint(lambda x: self.attention(self.norm1(x), cos, sin), x, **options))
        return x + cast(Tensor, checkpoint(self.mlp, checkpoint(self.norm2, x, use_reentrant=True), **options))


class CheckpointedNorm(lm.LanguageModel):
    """Its norm behind the blocks runs again too."""

    reentrant: bool

    def forward(self, tokens: Tensor, positions: Tensor, document_starts: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        rotary = lm.rotary_cos_sin(positions, self.head_size, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, *rotary)
        return self.head(checkpoint(self.norm, x, use_reentrant=self.reentrant))


def checkpointed(where: str, *, reentrant: bool) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(7)
        model: Any = CheckpointedNorm(width=32, layers=2, heads=8, kv_heads=2).double()
    model.reentrant = reentrant
    classes = {"blocks": Checkpointed, "parts": PartlyCheckpointed, "nowhere": lm.Block}
    for block in model.blocks:
        block.__class__, block.reentrant = classes[where], reentrant
    return model


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["blocks", "parts"])
def test_blocks_that_run_again_in_backward(where, reentrant):
    batches = tokens(4, length=7)
    expected = oracle.train(checkpointed("nowhere", reentrant=False), lm.loss, ADAM, batches, clip=0.5)
    make = functools.partial(checkpointed, where, reentrant=reentrant)
    assert largest_deviation(split_plan(tp=2), batches, expected, make) <= TOLERANCE


class TwoPasses(nn.Module):
    """It runs its blocks on two inputs of different lengths before backward."""

    def __init__(self, where: str, short: int, *, reentrant: bool) -> None:
        super().__init__()
        self.short, self.model = short, checkpointed(where, reentrant=reentrant)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        short = self.model(tokens[:, : self.short], positions[:, : self.short])
        return self.model(tokens, positions) + F.pad(short, (0, 0, 0, tokens.shape[1] - self.short))


TWO_PASSES_RULES = {f"model.{pattern}": rule for pattern, rule in lm.TENSOR_RULES.items()}


@pytest.mark.parametrize("short", [4, 6])
@pytest.mark.parametrize("reentrant", [False, True])
def test_lengths_are_known_to_blocks_and_norms_that_run_again(reentrant, short):
    """Of 6 and of 7 tokens, three of four ranks have as many."""

    def make(*, reentrant: bool) -> nn.Module:
        model = TwoPasses("nowhere" if reentrant else "blocks", short, reentrant=reentrant).double()
        model.get_parameter("model.norm.weight").requires_grad_(not reentrant)  # it would get two gradients
        return model

    batches = tokens(4, length=7)
    one_device = make(reentrant=reentrant)
    cast(Any, one_device).model.reentrant = False
    expected = oracle.train(one_device, lm.loss, ADAM, batches, clip=0.5)

    def body(comm):
        step = language_step(split_plan(tp=4), comm, make(reentrant=reentrant), tensor=TWO_PASSES_RULES)
        return deviation(step, *train(step, batches), expected)

    assert max(threads.run(4, body)) <= TOLERANCE


def test_two_gradients_of_a_norm_that_runs_again_are_named_on_all_ranks():
    """As on one device: the lengths are no reason."""

    def body(comm):
        step = language_step(split_plan(tp=2), comm, TwoPasses("nowhere", 4, reentrant=True), tensor=TWO_PASSES_RULES)
        with pytest.raises(TaskError) as error:
            step(tokens(4, length=7)[0])
        return str(error.value)

    for message in threads.run(2, body):
        assert (
            "two gradients of model.norm.weight in one backward (a reentrant checkpoint around its layer?)" in message
        )
        assert "checkpoint(…, use_reentrant=False)" in message


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_models_of_transformers_with_checkpoints(kind):
    def body(comm):
        model: Any = hugging_face(kind)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        step = TrainStep(model, logits_loss, ADAM, plan=split_plan(tp=2), communicator=comm, clip=0.5)
        with Float64Mode():
            return deviation(step, *train(step, texts()), hugging_face_on_one_device(kind))

    assert max(threads.run(2, body)) <= TOLERANCE


# ---- evaluation -------------------------------------------------------------------------------------


def test_evaluation_and_sampling_are_those_of_the_whole_model(without_dry_run):
    (inputs, _), whole = tokens(3, length=7)[0], language_model()
    sample = functools.partial(lm.generate, prompt="a", length=5, temperature=0.7, num_bytes=6)
    expected = whole(**inputs), sample(whole)

    def body(comm):
        step = language_step(split_plan(tp=4), comm)
        with step.unsharded(), torch.no_grad():
            return step.model(**inputs), sample(step.model)

    for logits, text in threads.run(4, body):
        torch.testing.assert_close(logits, expected[0], rtol=1e-9, atol=1e-9)
        assert text == expected[1]


# ---- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_sends_what_the_formula_says(tp, without_dry_run):
    B, L, D, size = 4, 16, 32, 8

    def sent(layers: int, *, splits: bool) -> float:
        def body(comm):
            with SEED_LOCK:
                model = lm.LanguageModel(width=D, layers=layers, heads=4, kv_heads=4).double()
            plan = Plan(tp=tp, sequence_parallel=splits, transport="gloo", bucket_bytes=2**20)
            return language_step(plan, comm, model)(tokens(B)[0]).sent_bytes

        (found,) = set(threads.run(tp, body))
        return found

    unit, norms = B * L * D * size * (tp - 1) / tp, 2 * D * size * 2 * (tp - 1) / tp
    whole, split = (sent(2, splits=each) - sent(1, splits=each) for each in (False, True))
    assert (whole, split) == (8 * unit, 10 * unit + norms)


class CountedCalls(MessageTensorGroup):
    """A group of one that counts its collectives."""

    def __init__(self) -> None:
        super().__init__(CommMeter(), torch.device("cpu"))
        self.calls: list[str] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return super().all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.calls.append("all_gather")
        return super().all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.calls.append("reduce_scatter")
        return super().reduce_scatter(tensor, dim)


def test_tokens_are_gathered_once_however_many_layers_read_them():
    group = CountedCalls()
    region = SplitRegion(group)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers:
        shards = {name: TensorShard.even(p.shape, 0, 0, 1) for name, p in layer.named_parameters()}
        split_layer(layer, Style.COLUMN, region, shards)
    rows = region.split_tokens(torch.randn(2, 3, 4, requires_grad=True), where="a block")
    whole = region.gather_tokens(rows, where="the layers")
    outputs = sum(layer(whole).square().sum() for layer in layers) + whole.sum()
    assert group.calls == ["all_gather"]
    outputs.backward(retain_graph=True)
    backward = ["all_gather", "reduce_scatter", "all_gather"]  # again for the weights; of gradients; at the start
    assert group.calls == ["all_gather", *backward]
    weights = [layer.weight for layer in layers]
    gradients = [cast(Tensor, weight.grad).clone() for weight in weights]
    outputs.backward()
    assert group.calls == ["all_gather", *backward, *backward]
    assert all(torch.equal(2 * one, cast(Tensor, p.grad)) for one, p in zip(gradients, weights, strict=True))


def test_a_gathered_tensor_is_freed_with_its_module():
    region = SplitRegion(CountedCalls())
    layer = nn.Linear(4, 4)
    split_layer(
        layer, Style.COLUMN, region, {n: TensorShard.even(p.shape, 0, 0, 1) for n, p in layer.named_parameters()}
    )
    for requires_grad in (False, True):
        rows = region.split_tokens(torch.randn(2, 3, 4, requires_grad=requires_grad), where="a block")
        whole = region.gather_tokens(rows, where="the layer")
        reference, output = weakref.ref(whole), layer(whole)
        del whole
        assert reference() is None
        output.sum().backward()


def saved_bytes(layers: int, tp: int, *, splits: bool, length: int = 16) -> int:
    def body(comm):
        with SEED_LOCK:
            model = lm.LanguageModel(width=32, layers=layers, heads=4, kv_heads=4).double()
        step = language_step(Plan(tp=tp, sequence_parallel=splits), comm, model)
        with step.unsharded(), torch.enable_grad(), recording_saved(excluded=step.model.parameters()) as saved:
            logits = step.model(**tokens(4, length=length)[0][0])
        assert logits.requires_grad
        return saved.num_bytes

    return max(threads.run(tp, body))


def test_hidden_tensors_are_saved_split():
    B, L, D, size = 4, 16, 32, 8
    for tp in (2, 4):
        whole, split = (saved_bytes(2, tp, splits=each) - saved_bytes(1, tp, splits=each) for each in (False, True))
        hidden = B * L * D * size
        # A block saves, of each of two norms, the input, the input times its scale, the scales, and the output, which
        # is the input of a column layer.
        assert whole - split == (6 * hidden + 2 * B * L * size) * (tp - 1) // tp


# ---- what goes wrong is named -----------------------------------------------------------------------


def raised(model: Any, plan: Plan, rules: Any = lm.TENSOR_RULES, batch: Any = None) -> str:
    """The message that all ranks raise in the dry run."""

    def body(comm):
        step = language_step(plan, comm, model(), tensor=rules)
        with pytest.raises(TaskError) as error:
            step.dry_run(tokens(2, length=7)[0] if batch is None else batch)
        return str(error.value)

    (message,) = set(threads.run(plan.mesh.size, body))
    return message


@pytest.mark.parametrize("tp", [2, 4])
def test_a_sum_that_is_missing_or_doubled_is_named(tp, monkeypatch):
    apply = LeaveTokens.apply
    times = {"missing": 1 / 3, "doubled": 2}
    for text, factor in times.items():
        monkeypatch.setattr(LeaveTokens, "apply", lambda partial, *args, f=factor: apply(partial * f, *args))
        message = raised(language_model, split_plan(tp=tp))
        number = f"{factor:.4g}"
        assert f"blocks.0.attention.out (Linear) returns outputs that are not the whole model's, but {number}" in (
            message
        ), text


def test_gradients_without_their_sum_are_named(monkeypatch):
    monkeypatch.setattr(SplitRegion, "partials", lambda self, weights: tuple(weights))
    message = raised(language_model, split_plan(tp=2))
    assert "the gradient of norm.weight is missing its sum over the 2 tensor ranks (2 more like it)" in message


def test_a_bias_without_its_sum_is_named(monkeypatch):
    product = RowLinear._row_product
    monkeypatch.setattr(RowLinear, "_row_product", lambda self, x, weight, bias: product(self, x, weight, None) + bias)
    message = raised(lambda: Shifting(0), split_plan(tp=2), MIXER_RULES, features())
    assert "the gradient of blocks.1.mlp.down.bias is missing its sum over the 2 tensor ranks" in message


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.up(x).relu()))


class Shift(nn.Module):
    """It mixes tokens."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(self.number, -2) if self.number else x


class ShiftingBlock(nn.Module):
    def __init__(self, number: int, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.shift, self.mlp = Shift(number), MLP(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(x * self.scale + self.mlp(x))


class Shifting(nn.Module):
    """A block with a parameter of its own, which shifts the tokens by a number."""

    def __init__(self, number: int, dropout: float = 0.0) -> None:
        super().__init__()
        with SEED_LOCK:
            torch.manual_seed(1)
            self.blocks = nn.ModuleList(ShiftingBlock(number, dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MIXER_RULES = {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}


def features() -> Any:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 6, 8, generator=generator), torch.randint(0, 8, (4, 6), generator=generator)


def test_tokens_that_mix_between_blocks_are_named():
    message = raised(lambda: Shifting(1), split_plan(tp=2), MIXER_RULES, features())
    assert "blocks.0.shift (Shift) returns outputs that are not the whole model's" in message
    assert "need what works on each token independently" in message
    assert "try sequence_parallel = false" in message


class DictBlock(nn.Module):
    """A block that calls the layers of an nn.ModuleDict itself, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp["down"](self.mlp["up"](x).relu())


def of_dicts() -> Shifting:
    """Its MLPs have their layers in an nn.ModuleDict."""
    model = Shifting(0)
    with SEED_LOCK:
        torch.manual_seed(1)
        for block in model.blocks:
            cast(ShiftingBlock, block).mlp = DictBlock()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(("make", "rules"), [
    (lambda: Shifting(0), MIXER_RULES),
    (of_dicts, {"blocks.*.mlp.mlp.up": "column", "blocks.*.mlp.mlp.down": "row"}),
], ids=["parameters of its own", "layers in a dict"])  # fmt: skip
def test_a_block_trains_as_on_one_device(make, rules):
    def body(comm):
        step = language_step(split_plan(tp=2), comm, make().double(), tensor=rules)
        return deviation(step, *train(step, [(x.double(), targets)] * 2), expected)

    x, targets = features()
    expected = oracle.train(make().double(), lm.loss, ADAM, [(x.double(), targets)] * 2, clip=0.5)
    assert max(threads.run(2, body)) <= TOLERANCE


class Noisy(nn.Module):
    """Dropout of the tokens that a rank has, with the masks of the last forward.

    Each rank draws from equal states, as processes do: threads share torch's generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self._state = torch.Generator().manual_seed(seed).get_state()

    def forward(self, x: Tensor) -> Tensor:
        with SEED_LOCK, torch.random.fork_rng([]):
            torch.set_rng_state(self._state)
            mask = F.dropout(torch.ones_like(x), 0.5, self.training)
            self._state = torch.get_rng_state()
        self.masks.append(mask)
        return x * mask


def noisy() -> Shifting:
    model = Shifting(0)
    for seed, block in enumerate(model.blocks):
        cast(ShiftingBlock, block).shift = Noisy(seed)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(("first_length", "length"), [(6, 6), (6, 7), (6, 5), (1, 6)])
def test_dropout_of_split_tokens_drops_other_entries_on_each_rank(first_length, length):
    """Batches of lengths that the dry run has not seen, and that tensor ranks do not divide. Of one token in the dry
    run, the first rank has all."""

    def body(comm):
        model, (x, targets) = noisy().double(), features()
        step = language_step(split_plan(tp=2), comm, model, tensor=MIXER_RULES, clip=None)
        step((x.double()[:, :first_length], targets[:, :first_length]))
        x, targets = torch.cat([x, x], 1)[:, :length], torch.cat([targets, targets], 1)[:, :length]
        layers = [cast(Noisy, cast(ShiftingBlock, block).shift) for block in model.blocks]
        for layer in layers:
            layer.masks.clear()
        step((x.double(), targets))
        return [layer.masks[0] for layer in layers]

    first, second = threads.run(2, body)
    for one, other in zip(first, second, strict=True):
        assert one.shape[1] + other.shape[1] == length
        fewest = min(one.shape[1], other.shape[1])
        assert not torch.equal(one[:, :fewest], other[:, :fewest])
    assert not torch.equal(first[0], first[1])


class OnlySecond(Shifting):
    """It leaves out the block at which tokens are split."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](x)


class ThenOnlySecond(Shifting):
    """It leaves out that block in a second pass, with as many tokens as a rank had in the first one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :3] + self.blocks[1](x[:, :3])


@pytest.mark.parametrize(("model", "num_tokens"), [(OnlySecond, 6), (ThenOnlySecond, 3)])
def test_blocks_without_the_first_one_are_rejected(model, num_tokens):
    message = raised(lambda: model(0), split_plan(tp=2), MIXER_RULES, features())
    assert f"{num_tokens} tokens for blocks.1.mlp, where this rank should have none" in message
    assert "the first block before the others" in message


def task(model: Any, rules: Any) -> ff.Task:
    return ff.Task(model=model, loss=F.mse_loss, data=lambda: None, optimizer=ADAM, tensor=rules)  # type: ignore[arg-type]


class OneVector(Shifting):
    """Its blocks get one vector of features, without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.mean((0, 1)))


def test_hidden_tensors_without_tokens_are_rejected():
    message = raised(lambda: OneVector(0), split_plan(tp=2), MIXER_RULES, features())
    assert "[8] for blocks.0   need a hidden tensor [..., tokens, features]" in message


def test_impossible_plans_are_rejected_before_processes_start():
    with pytest.raises(PlanError, match="sequence_parallel = true with tp = 1"):
        preflight(task(lambda: Shifting(0), MIXER_RULES), Plan(sequence_parallel=True))
    preflight(task(lambda: Shifting(0), MIXER_RULES), split_plan(tp=2))
    blocks_of_layers = task(lambda: nn.Sequential(MLP(), MLP()), {"*.up": "column", "*.down": "row"})
    with pytest.raises(PlanError, match=r"the column layer \*\.up directly in the block, a MLP"):
        preflight(blocks_of_layers, split_plan(tp=2))
    preflight(blocks_of_layers, Plan(tp=2))
    blocks_of_dicts = task(lambda: nn.Sequential(DictBlock(), DictBlock()), {"*.mlp.up": "column", "*.mlp.down": "row"})
    with pytest.raises(PlanError, match=r"the column layer \*\.mlp\.up directly in the block, a DictBlock"):
        preflight(blocks_of_dicts, split_plan(tp=2))
