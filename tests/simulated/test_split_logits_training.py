"""Training with split logits: the law holds with every loss, and cross entropy sends no logits."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.axes.tensor.work.split_logits import whole_logits
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.words.errors import DivergenceError, TaskError
from tests.cases import SEED_LOCK
from tests.simulated.test_split_cross_entropy import Counting
from tests.simulated.test_tensor_axis import (
    ADAM,
    HUGGING_FACE,
    SIZES,
    TOLERANCE,
    deviation,
    hugging_face,
    texts,
    tokens,
    train,
)

HEADS = {"llama": "lm_head", "qwen3": "lm_head", "gpt2": "lm_head", "bert": "cls.predictions.decoder", "lm": "head"}


def count_head(step: TrainStep, name: str) -> Counting:
    """From now on counts what all layers of the model exchange."""
    region: Any = step.model.get_submodule(HEADS[name]).region
    region.group = Counting(region.group)
    return region.group


def head_numbers(group: Counting, name: str) -> int:
    return sum(numbers for each, numbers in group.elements if each == name)


# ---- models that compute their own loss ----------------------------------------------------------------


def labelled() -> list[Any]:
    """Batches with the labels among the inputs; some are ignored."""
    return [{**inputs, "labels": targets.where(targets % 5 > 0, -100)} for inputs, targets in texts()]


def own_loss(outputs: Any, targets: Any) -> tuple[Tensor, int]:
    return outputs.loss, 1


@functools.cache
def own_loss_on_one_device(kind: str) -> oracle.TrainingResult:
    model = hugging_face(kind)
    with Float64Mode():  # norms of these models, and their losses, compute in float32
        return oracle.train(model, own_loss, ADAM, [(batch, None) for batch in labelled()])


def steps_of(step: TrainStep, batches: list[Any]) -> tuple[list[float], list[Any]]:
    metrics = [step(batch) for batch in batches]
    step.flush()
    return [each.loss for each in metrics], [each.grad_norm for each in metrics]


@pytest.mark.covering
@pytest.mark.parametrize("fields", [{"tp": 2}, {"tp": 4}, {"tp": 2, "microbatches": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_with_their_own_loss_train_as_on_one_device_and_send_no_logits(kind, fields, without_dry_run):
    plan = Plan(**fields, bucket_bytes=8000)
    expected = own_loss_on_one_device(kind)

    def body(comm):
        step = TrainStep(hugging_face(kind), None, ADAM, plan=plan, communicator=comm)
        group = count_head(step, kind)
        with Float64Mode():
            found = deviation(step, *steps_of(step, labelled()), expected)
        assert head_numbers(group, "all_gather") == 0
        assert head_numbers(group, "all_reduce_max") == sum(batch["labels"].numel() for batch in labelled())
        sums = [numbers for (name, _), (_, numbers) in zip(group.elements, group.elements[1:], strict=False)
                if name == "all_reduce_max"]  # fmt: skip
        assert sum(sums) == 2 * head_numbers(group, "all_reduce_max")
        return found

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_dry_run_takes_models_with_their_own_loss(kind):
    expected = own_loss_on_one_device(kind)

    def body(comm):
        step = TrainStep(hugging_face(kind), None, ADAM, plan=Plan(tp=2, microbatches=2), communicator=comm)
        with Float64Mode():
            return deviation(step, *steps_of(step, labelled()), expected)

    assert max(threads.run(2, body)) <= TOLERANCE


# ---- losses of the user's ------------------------------------------------------------------------------


class Checkpointed(lm.LanguageModel):
    """The head is computed a second time in backward."""

    def forward(self, tokens: Tensor, positions: Tensor, document_starts: Tensor | None = None) -> Tensor:
        head, self.head = self.head, nn.Identity()
        try:
            features = super().forward(tokens, positions)
        finally:
            self.head = head
        return checkpoint(self.head, features, use_reentrant=False)


def language_model(kind: type[lm.LanguageModel] = lm.LanguageModel) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(7)
        return kind(**SIZES).double()


def torchs(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Gradients go through all logits."""
    return (logits.softmax(-1) - F.one_hot(targets, logits.shape[-1])).square().sum(-1)


def with_a_penalty(logits: Tensor, targets: Tensor) -> Tensor:
    return ff.losses.cross_entropy(logits, targets) + 1e-2 * logits.logsumexp(-1).square()


def in_place(logits: Tensor, targets: Tensor) -> Tensor:
    return softmax(logits.mul_(0.5), targets)


# The loss, and how often each forward gathers the logits.
LOSSES = {
    "ours": (lm.loss, 0),
    "torch's": (torchs, 0),
    "softmax": (softmax, 1),
    "with a penalty": (with_a_penalty, 1),
    "in place": (in_place, 1),
}
CASES = [
    ("ours", {"tp": 4}),
    ("ours", {"tp": 2, "microbatches": 3}),  # of two samples: one microbatch is empty
    ("ours", {"tp": 2, "cp": 2}),  # of 13 tokens: some are padding, whose logits are dropped
    ("torch's", {"tp": 2, "dp": 2, "zero": 3}),
    ("torch's", {"tp": 2, "microbatches": 2}),
    ("softmax", {"tp": 4, "microbatches": 2}),
    ("softmax", {"tp": 2, "cp": 2}),
    ("with a penalty", {"tp": 2, "microbatches": 3}),
]


@pytest.mark.covering
@pytest.mark.parametrize("model", [lm.LanguageModel, Checkpointed])
@pytest.mark.parametrize(("name", "fields"), CASES, ids=str)
def test_every_loss_trains_as_on_one_device(name, fields, model, without_dry_run):
    plan, (loss, num_gathers) = Plan(**fields, bucket_bytes=8000), LOSSES[name]
    batches = tokens(2, length=13)
    expected = oracle.train(language_model(), loss, ADAM, batches)

    def body(comm):
        step = TrainStep(language_model(model), loss, ADAM, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)
        group = count_head(step, "lm")
        first = train(step, batches[:1])[0]
        group.elements.clear()  # with cp a dry run has seen the first batch
        losses, norms = train(step, batches[1:])
        gathers = [numbers for each, numbers in group.elements if each == "all_gather"]
        assert len(gathers) == num_gathers * min(plan.microbatches, 2 // plan.dp)
        return deviation(step, first + losses, norms, expected)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


@pytest.mark.covering
@pytest.mark.parametrize("model", [lm.LanguageModel, Checkpointed])
@pytest.mark.parametrize("fields", [{"tp": 2, "microbatches": 2}, {"tp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("name", ["ours", "torch's", "softmax", "in place"])
def test_the_dry_run_takes_every_loss(name, fields, model):
    plan, (loss, _) = Plan(**fields, bucket_bytes=8000), LOSSES[name]
    batches = tokens(2)
    expected = oracle.train(language_model(), loss, ADAM, batches)

    def body(comm):
        step = TrainStep(language_model(model), loss, ADAM, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)
        return deviation(step, *train(step, batches), expected)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


def test_a_wrong_rule_is_named_though_logits_are_split():
    """The logits stay split from the head to the loss, but are twice those of the whole model."""

    class Scaled(lm.LanguageModel):
        def forward(self, tokens: Tensor, positions: Tensor, document_starts: Tensor | None = None) -> Tensor:
            logits = super().forward(tokens, positions)
            return logits * logits.shape[-1] / self.head.weight.shape[0]  # of the whole model: 1

    def body(comm):
        model = language_model(Scaled)
        step = TrainStep(model, lm.loss, ADAM, plan=Plan(tp=2), communicator=comm, tensor=lm.TENSOR_RULES)
        with pytest.raises(TaskError, match="2 times"):
            step(tokens(2)[0])

    threads.run(2, body)


class Hooked(lm.LanguageModel):
    """A hook on logits sees the gradient of all of them."""

    def forward(self, tokens: Tensor, positions: Tensor, document_starts: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens, positions)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient - gradient.mean(-1, keepdim=True))
        return logits


@pytest.mark.parametrize("fields", [{"tp": 2, "microbatches": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_hooks_on_logits_see_all_classes(fields):
    plan = Plan(**fields, bucket_bytes=8000)
    expected = oracle.train(language_model(Hooked), softmax, ADAM, tokens(2))

    def body(comm):
        step = TrainStep(language_model(Hooked), softmax, ADAM, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)
        return deviation(step, *train(step, tokens(2)), expected)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


def test_a_compiled_loss_gets_whole_logits(without_dry_run):
    loss = torch.compile(torchs, backend="eager")
    batches = tokens(2)
    expected = oracle.train(language_model(), torchs, ADAM, batches)

    def body(comm):
        step = TrainStep(language_model(), loss, ADAM, plan=Plan(tp=2), communicator=comm, tensor=lm.TENSOR_RULES)
        group = count_head(step, "lm")
        found = deviation(step, *train(step, batches), expected)
        assert sum(name == "all_gather" for name, _ in group.elements) == len(batches)
        return found

    assert max(threads.run(2, body)) <= TOLERANCE


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_as_with_gathered_logits(precision, without_dry_run):
    """All ranks get the same bits, and what they get is as near to float64 as with whole logits."""
    expected = oracle.train(language_model(), lm.loss, ADAM, tokens(8))

    def body(comm):
        losses = []
        for loss in (lm.loss, lambda logits, targets: lm.loss(whole_logits(logits), targets)):
            step = TrainStep(
                language_model().float(), loss, ADAM, plan=Plan(tp=2, precision=precision), communicator=comm,
                tensor=lm.TENSOR_RULES, drift_check=1,
            )  # fmt: skip
            losses.append(train(step, tokens(8))[0])
        return losses

    first, second = threads.run(2, body)
    assert first == second
    split, whole = (max(abs(a - b) for a, b in zip(each, expected.losses, strict=True)) for each in first)
    assert split <= 2 * whole + 1e-3


def test_an_evaluation_has_whole_logits(without_dry_run):
    def body(comm):
        step = TrainStep(language_model(), lm.loss, ADAM, plan=Plan(tp=2), communicator=comm, tensor=lm.TENSOR_RULES)
        inputs, targets = tokens(2)[0]
        run = step.run_forward((inputs, targets))
        assert run is not None
        assert type(run.outputs) is Tensor
        logits = language_model()(**inputs)
        return (run.outputs - logits).abs().max().item()

    assert max(threads.run(2, body)) <= TOLERANCE


def test_logits_that_one_rank_reads_after_the_step_end_all_of_them(without_dry_run):
    def body(comm):
        kept: list[Tensor] = []

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            kept.append(outputs)
            return lm.loss(outputs, targets)

        plan = Plan(tp=2, transport="gloo")
        step = TrainStep(language_model(), loss, ADAM, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)
        step(tokens(4)[0])
        with pytest.raises(DivergenceError) as caught:
            str(kept) if comm.rank == 0 else step(tokens(4)[1])
        return str(caught.value)

    for message in threads.run(2, body):
        assert "rank 0 is at the whole logits; rank 1 is at step 2" in message
