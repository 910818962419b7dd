"""The tensor axis: a model that is cut trains as one device does, on every mesh."""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fourfold as ff
from fourfold.axes.tensor.rules.styles import Style
from fourfold.axes.tensor.work.layers import local_part, split_layer
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.host import LazyReducer
from fourfold.comm.tensor_group import MessageTensorGroup
from fourfold.plan.param_spec import TensorShard
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.step.model_checks import check_update_timing
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.words.errors import OptimizerError, PlanError, SettingError, TaskError, TrainingError
from fourfold.words.mesh import Mesh
from tests import cases
from tests.cases import SEED_LOCK

TOLERANCE = 1e-9
MESHES = [
    Mesh(dp=8 // cp // tp, cp=cp, tp=tp) for cp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if cp * tp <= 8
]  # fmt: skip
SIZES = {"width": 32, "layers": 1, "heads": 8, "kv_heads": 2}
VOCABULARY = 57  # no place of the tensor axis has as many rows as another


def language_model() -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(7)
        return lm.LanguageModel(**SIZES).double()


def tokens(batch: int, *, length: int = 16, vocabulary: int = 256) -> list[Any]:
    """The global batches of two steps: inputs and targets."""
    generator = torch.Generator().manual_seed(11)
    draw = functools.partial(torch.randint, 0, vocabulary, (batch, length), generator=generator)
    positions = torch.arange(length).expand(batch, length)
    return [({"tokens": draw(), "positions": positions}, draw()) for _ in range(2)]


ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)


@functools.cache
def one_device() -> oracle.TrainingResult:
    return oracle.train(language_model(), lm.loss, ADAM, tokens(8), clip=0.5)


def deviation(step: TrainStep, losses: list[float], norms: list[Any], expected: oracle.TrainingResult) -> float:
    """The largest deviation of losses, norms and this rank's shards of the weights. Collective."""
    pairs: list[tuple[Any, Any]] = [(losses, expected.losses)]
    if expected.grad_norms:
        pairs.append((norms, expected.grad_norms))
    shards = step.tensor_shards
    for name, weight in step.named_weights():
        assert weight.shape == expected.weights[name].shape or name in shards
        whole = expected.weights[name]
        pairs.append((weight, whole if weight.shape == whole.shape else local_part(whole, shards[name])))
    return max(largest(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs() / b.abs().clamp(min=1)).max().item()


def train(step: TrainStep, batches: list[Any]) -> tuple[list[float], list[Any]]:
    metrics = [step(cases.local_batch(batch, step.plan.dp, step.dp_index)) for batch in batches]
    step.flush()
    return [each.loss for each in metrics], [each.grad_norm for each in metrics]


@pytest.mark.covering
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"dp{mesh.dp} cp{mesh.cp} tp{mesh.tp}")
def test_every_mesh_of_eight_ranks_trains_as_one_device(mesh, zero, without_dry_run):
    plan = Plan(dp=mesh.dp, cp=mesh.cp, tp=mesh.tp, zero=zero, bucket_bytes=8000)

    def body(comm):
        step = TrainStep(
            language_model(), lm.loss, ADAM, plan=plan, communicator=comm, clip=0.5, tensor=lm.TENSOR_RULES
        )
        return deviation(step, *train(step, tokens(8)), one_device())

    assert max(threads.run(8, body)) <= TOLERANCE


HUGGING_FACE: dict[str, Any] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config,
        {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "bert": (
        transformers.BertForMaskedLM,
        transformers.BertConfig,
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
UNTIED_BERT = (*HUGGING_FACE["bert"][:2], {**HUGGING_FACE["bert"][2], "tie_word_embeddings": False})


def hugging_face(kind: str, **given: Any) -> nn.Module:
    model, config, options = HUGGING_FACE.get(kind, UNTIED_BERT)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, **given}
    with SEED_LOCK:
        torch.manual_seed(3)
        return model(config(**sizes, **options)).double()


def logits_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="none")


def texts() -> list[Any]:
    return [
        ({"input_ids": inputs["tokens"]}, targets) for inputs, targets in tokens(4, length=12, vocabulary=VOCABULARY)
    ]


@functools.cache
def hugging_face_on_one_device(kind: str) -> oracle.TrainingResult:
    model = hugging_face(kind)
    with Float64Mode():  # norms of these models compute in float32
        return oracle.train(model, logits_loss, ADAM, texts(), clip=0.5)


@pytest.mark.parametrize("fields", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_transformers_train_by_their_own_rules_as_on_one_device(kind, fields, without_dry_run):
    plan = Plan(**fields, bucket_bytes=8000)
    expected = hugging_face_on_one_device(kind)

    def body(comm):
        step = TrainStep(hugging_face(kind), logits_loss, ADAM, plan=plan, communicator=comm, clip=0.5)
        with Float64Mode():
            return deviation(step, *train(step, texts()), expected)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


EIGHT_HEADS = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}


def texts_with_positions() -> list[Any]:
    batches = tokens(8, vocabulary=VOCABULARY)
    return [
        ({"input_ids": inputs["tokens"], "position_ids": inputs["positions"]}, targets) for inputs, targets in batches
    ]


@functools.cache
def eight_heads_on_one_device(kind: str) -> oracle.TrainingResult:
    model = hugging_face(kind, **EIGHT_HEADS)
    with Float64Mode():
        return oracle.train(model, logits_loss, ADAM, texts_with_positions(), clip=0.5)


@pytest.mark.covering
@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda n: str(MESHES[n]))
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_transformers_train_as_on_one_device_on_every_mesh_of_eight_ranks(kind, number, without_dry_run):
    mesh, expected = MESHES[number], eight_heads_on_one_device(kind)
    plan = Plan(dp=mesh.dp, cp=mesh.cp, tp=mesh.tp, zero=(number + number // 4) % 4, bucket_bytes=8000)

    def body(comm):
        model = hugging_face(kind, **EIGHT_HEADS)
        step = TrainStep(model, logits_loss, ADAM, plan=plan, communicator=comm, clip=0.5)
        with Float64Mode():
            return deviation(step, *train(step, texts_with_positions()), expected)

    assert max(threads.run(8, body)) <= TOLERANCE


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bias_that_untied_bert_does_not_use_is_named_and_may_be_allowed(tp):
    """Untied, its head adds `decoder.bias`, and no forward reads `predictions.bias`: on one device too."""
    expected = hugging_face_on_one_device("untied bert")

    def body(comm):
        model, plan = hugging_face("untied bert"), Plan(tp=tp)
        with Float64Mode():
            with pytest.raises(TrainingError) as caught:
                TrainStep(model, logits_loss, ADAM, plan=plan, communicator=comm)(texts()[0])
            plan = dataclasses.replace(plan, unused="allow")
            step = TrainStep(hugging_face("untied bert"), logits_loss, ADAM, plan=plan, communicator=comm, clip=0.5)
            return [problem[0] for problem in caught.value.problems], deviation(step, *train(step, texts()), expected)

    for problems, found in threads.run(tp, body):
        assert problems == ["parameter cls.predictions.bias got no gradient"]
        assert found <= TOLERANCE


@pytest.mark.parametrize("fields", [
    {"microbatches": 3},
    {"dp": 2, "update": "in_forward", "zero": 3},
    {"dp": 2, "update": "in_backward", "zero": 2},
    {"dp": 2, "unused": "allow", "zero": 1},
    {"cp": 2, "ring": "gather", "zero": 1},
], ids=str)  # fmt: skip
def test_the_tensor_axis_goes_with_other_fields(fields):
    plan = Plan(tp=2, **fields, bucket_bytes=8000)
    clip = None if plan.update == "in_backward" else 0.5
    expected = oracle.train(language_model(), lm.loss, ADAM, tokens(8), clip=clip)

    def body(comm):
        step = TrainStep(
            language_model(), lm.loss, ADAM, plan=plan, communicator=comm, clip=clip, tensor=lm.TENSOR_RULES
        )
        return deviation(step, *train(step, tokens(8)), expected)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


@pytest.mark.parametrize("period", [5, 7])
def test_gradients_of_several_microbatches_wait_for_a_buffer(period, monkeypatch, without_dry_run):
    plan = Plan(dp=2, tp=2, microbatches=4, update="in_forward", bucket_bytes=8000)
    expected = oracle.train(language_model(), lm.loss, ADAM, tokens(8))

    def body(comm):
        step = TrainStep(language_model(), lm.loss, ADAM, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)
        return deviation(step, *train(step, tokens(8)), expected)

    numbers, is_free = itertools.count(), LazyReducer.can_acquire_buffer
    rarely_free = lambda *args: next(numbers) % period == 0 and is_free(*args)  # noqa: E731
    monkeypatch.setattr(LazyReducer, "can_acquire_buffer", rarely_free)
    assert max(threads.run(4, body)) <= TOLERANCE


def test_all_ranks_begin_with_the_weights_of_the_first(without_dry_run):
    def body(comm):
        model = language_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(comm.rank)
        step = TrainStep(model, lm.loss, ADAM, plan=Plan(dp=2, tp=2), communicator=comm, tensor=lm.TENSOR_RULES)
        whole = language_model().state_dict()
        shards = step.tensor_shards
        return all(torch.equal(p, local_part(whole[name], shards[name])) for name, p in model.named_parameters())

    assert all(threads.run(4, body))


def test_a_rank_holds_its_shards_and_no_more(without_dry_run):
    whole = sum(p.numel() for p in language_model().parameters())

    def body(comm):
        model = language_model()
        step = TrainStep(model, lm.loss, ADAM, plan=Plan(tp=4), communicator=comm, tensor=lm.TENSOR_RULES)
        assert [p.numel() for p in model.parameters()] == [s.num_elements for s in step.tensor_shards.values()]
        return sum(
            p.untyped_storage().nbytes() // 8
            for p in {p.untyped_storage().data_ptr(): p for p in model.parameters()}.values()
        )

    held = threads.run(4, body)
    norms, kv = 3 * 32, 2 * 2 * 4 * 32  # whole on all ranks; keys and values: two heads of four elements on four ranks
    assert sum(held) == whole + 3 * norms + kv


def test_tensor_ranks_with_different_batches_refuse_the_step(without_dry_run):
    def body(comm):
        step = TrainStep(language_model(), lm.loss, ADAM, plan=Plan(tp=2), communicator=comm, tensor=lm.TENSOR_RULES)
        first, second = tokens(8)
        step(first)
        before = [p.clone() for p in step.model.parameters()]
        with pytest.raises(TaskError, match="different batches on some of ranks 0, 1, which differ only on tp"):
            step(second if comm.rank else first)
        return all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))

    assert all(threads.run(2, body))


def test_layer_wise_updates_in_backward_are_rejected():
    optimizer = ff.optim.LAMB(language_model().parameters(), lr=1e-2)
    with pytest.raises(PlanError, match='in_backward" with LAMB at tp = 2   need the norms of whole parameters'):
        check_update_timing(optimizer, Plan(tp=2, update="in_backward"))


def test_step_hooks_are_rejected_which_would_see_shards(without_dry_run):
    def make_hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = ADAM(parameters)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    def body(comm):
        with pytest.raises(OptimizerError, match="a step pre-hook with tp = 2   need all gradients and weights"):
            TrainStep(
                language_model(), lm.loss, make_hooked, plan=Plan(tp=2), communicator=comm, tensor=lm.TENSOR_RULES
            )

    threads.run(2, body)


def test_rules_that_are_no_texts_are_refused():
    with pytest.raises(SettingError, match="need a dict from patterns of module names to styles"):
        parallelize(nn.Linear(4, 4), F.mse_loss, ADAM, Plan(), tensor={"up": 2})  # type: ignore[dict-item]
    with pytest.raises(TaskError, match="need a dict from patterns of module names to styles"):
        ff.Task(model=language_model, loss=lm.loss, data=lambda: None, optimizer=ADAM, tensor=["up"])  # type: ignore[arg-type]


class CountedGroup(MessageTensorGroup):
    """A group of one that counts its all-reduces."""

    def __init__(self) -> None:
        super().__init__(CommMeter(), torch.device("cpu"))
        self.num_all_reduces = 0

    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.num_all_reduces += 1
        return super().all_reduce_async(tensor)


def test_a_tensor_is_entered_once_however_many_layers_use_it():
    group = CountedGroup()
    region = SplitRegion(group)
    x = torch.randn(3, 4, requires_grad=True)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers:
        shards = {name: TensorShard.even(p.shape, 0, 0, 1) for name, p in layer.named_parameters()}
        split_layer(layer, Style.COLUMN, region, shards)
    sum(layer(x).square().sum() for layer in layers).backward()  # type: ignore[union-attr]
    assert group.num_all_reduces == 1
    with torch.no_grad():
        layers[0](x)
    y = torch.randn(3, 4, requires_grad=True)
    loss = layers[0](y).sum()  # its only layer sums the gradient of y, while it computes that of its weight
    loss.backward(retain_graph=True)
    assert group.num_all_reduces == 2
    layers[1](y).sum().backward()  # no more its only layer
    loss.backward()
    assert group.num_all_reduces == 4


def test_entered_tensors_are_freed_with_their_layers():
    region = SplitRegion(CountedGroup())
    weight = torch.randn(3, requires_grad=True)
    inputs = [weight * number for number in range(4)]
    references = [weakref.ref(x) for x in inputs]
    sum(region.enter(x).sum() for x in inputs).backward()  # type: ignore[union-attr]
    del inputs
    assert [reference() for reference in references] == [None] * 4


def test_a_tensor_that_was_changed_in_place_is_entered_again():
    group = CountedGroup()
    region = SplitRegion(group)
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    x = weight * 1.0
    first = region.enter(x).sum()
    x.mul_(3.0)
    (first + region.enter(x).sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0]
    assert group.num_all_reduces == 2


class Writing(nn.Module):
    """Outputs of a column layer and logits of classes that no number of ranks divides are written in place."""

    def __init__(self) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        self.blocks = nn.ModuleList([nn.Sequential(mlp)])
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks[0](x))
        logits /= 1.5
        return logits.transpose(1, 2)


@pytest.mark.parametrize("splits", [False, True])
def test_a_model_may_write_the_output_of_a_column_layer_in_place(splits):
    def body(comm: Any) -> list[torch.Tensor]:
        with SEED_LOCK:
            torch.manual_seed(7)
            model = Writing().double()
        rules = {"blocks.0.0.0": "column", "blocks.0.0.2": "row", "head": "vocabulary"}
        plan = Plan(tp=comm.size, sequence_parallel=splits and comm.size > 1)
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(model, F.cross_entropy, sgd, plan=plan, communicator=comm, tensor=rules)
        generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            x = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
            step((x, torch.randint(0, 5, (4, 3), generator=generator)))
        return [each.clone() for each in step.state_dict()["model"].values()]

    (expected,) = threads.run(1, body)
    for got in threads.run(2, body):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_a_token_outside_of_the_vocabulary_is_refused_on_all_ranks(without_dry_run):
    def body(comm):
        step = TrainStep(language_model(), lm.loss, ADAM, plan=Plan(tp=2), communicator=comm, tensor=lm.TENSOR_RULES)
        inputs, targets = tokens(8)[0]
        for token in (256, -1):
            bad = inputs["tokens"].clone()
            bad[3, 2] = token
            with pytest.raises(TaskError, match=f"token {token} in a vocabulary of 256"):
                step.run_forward(({**inputs, "tokens": bad}, targets))

    threads.run(2, body)


@pytest.mark.parametrize(
    "fields", [{"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "dp": 2, "zero": 2}], ids=str
)
def test_whole_weights_stay_the_same_bits_on_all_ranks_in_half_precision(fields, without_dry_run):
    def body(comm):
        plan = Plan(tp=2, **fields, bucket_bytes=8000)
        model = language_model().float()
        options: dict[str, Any] = {"clip": 0.5, "drift_check": 1, "tensor": lm.TENSOR_RULES}
        step = TrainStep(model, lm.loss, ADAM, plan=plan, communicator=comm, **options)
        losses, norms = train(step, tokens(8) + tokens(6))  # raises DivergenceError where bits differ
        return losses, norms

    results = threads.run(2 * fields.get("dp", 1), body)
    assert all(each == results[0] for each in results)


def test_a_bad_step_is_skipped_by_all_tensor_ranks(without_dry_run):
    def body(comm):
        numbers = itertools.count()

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return lm.loss(logits, targets) * (float("nan") if next(numbers) == 1 else 1.0)

        options: dict[str, Any] = {"skip_nan": 1, "tensor": lm.TENSOR_RULES}
        step = TrainStep(language_model(), loss, ADAM, plan=Plan(tp=2), communicator=comm, **options)
        batch = tokens(8)[0]
        metrics = [step(batch) for _ in range(3)]
        return [(each.samples, each.tokens, each.skipped is not None) for each in metrics]

    # Samples and tokens count once, though two ranks have them.
    assert threads.run(2, body) == [[(8, 128, False), (8, 128, True), (8, 128, False)]] * 2
