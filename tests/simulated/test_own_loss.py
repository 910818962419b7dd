"""Laws of samples that are dicts, and of models that compute their own loss (loss = None)."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.feed.feed import Feed
from fourfold.feed.source import TensorSource
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import preflight
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.trainer.evaluate import evaluate
from fourfold.verification.command import verify
from fourfold.words.errors import DataError, TaskError
from fourfold.words.task import Data, Task
from tests.cases import SEED_LOCK
from tests.simulated.test_transformers import MODELS, KeepFloat64, made

SAMPLES, LENGTH = 11, 8
sgd = functools.partial(torch.optim.SGD, lr=0.1)


class Texts:
    """Samples like those of Hugging Face datasets: lists of numbers, with some labels ignored."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 50, (LENGTH,), generator=generator)
        labels = tokens.where(torch.rand(LENGTH, generator=generator) < index / SAMPLES, -100)
        return {"input_ids": tokens.tolist(), "labels": labels, "attention_mask": [1] * LENGTH}


def whole() -> dict[str, Tensor]:
    texts = [Texts()[index] for index in range(SAMPLES)]
    return {name: torch.stack([torch.as_tensor(text[name]) for text in texts]) for name in texts[0]}


def classifier() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    options = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(intermediate_size=16, num_labels=50, **options, **dropouts)
    return transformers.BertForTokenClassification(config)


@functools.cache
def model(kind: str) -> nn.Module:
    if kind in MODELS:
        return made(kind)
    torch.manual_seed(3)
    return classifier().double()


@pytest.mark.covering
@pytest.mark.parametrize("split", [(1, 1, 0), (2, 1, 0), (1, 3, 0), (3, 2, 0), (3, 5, 1), (2, 2, 3)])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "classifier"])
def test_a_model_of_transformers_trains_its_own_loss_as_in_one_process(kind, split):
    dp, microbatches, zero = split

    def body(comm):
        transport = "gloo" if zero == 3 else "auto"
        plan = Plan(dp=dp, microbatches=microbatches, zero=zero, unused="allow", transport=transport)
        with KeepFloat64():
            step = TrainStep(copy.deepcopy(model(kind)), None, sgd, plan=plan, communicator=comm, clip=None)
            metrics = []
            for _ in range(2):
                batch = whole()
                mine = slice(SAMPLES * step.dp_index // dp, SAMPLES * (step.dp_index + 1) // dp)
                metrics.append(step({name: values[mine] for name, values in batch.items()}))
            step.flush()
            return oracle.snapshot(step, [m.loss for m in metrics], [])

    with KeepFloat64():
        single, losses = copy.deepcopy(model(kind)), []
        optimizer = sgd(single.parameters())
        for _ in range(2):
            loss = single(**whole()).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    expected = oracle.TrainingResult(losses, [], {name: p.detach() for name, p in single.named_parameters()})
    got = threads.run(dp, body)
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


class Own(nn.Module):
    """Computes its loss from `x` and `labels`, and returns it in the form `how`."""

    def __init__(self, how: str = "dict") -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layer(x)
        loss = None if labels is None else F.cross_entropy(scores, labels)
        return {"dict": {"loss": loss, "logits": scores}, "tuple": (scores, loss), "number": loss}[self.how]


class Pairs:
    """Ten dicts with four features and a class."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        row = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": row, "labels": -100 if index % 4 == 1 else index % 3}


def own(how: str = "dict") -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(1)
        return Own(how).double()


def task(**fields: Any) -> Task:
    data = Data(train=Pairs(), valid=Pairs())
    given = {"model": own, "loss": None, "data": lambda: data, "optimizer": sgd, "batch_size": 10, "steps": 3}
    return Task(**given | fields)


def build(comm, how: str = "dict", plan: Plan | None = None) -> TrainStep:
    return TrainStep(own(how), None, sgd, plan=plan or Plan(dp=comm.size), communicator=comm, clip=None)


@pytest.mark.parametrize("how", ["dict", "tuple", "number"])
def test_the_loss_is_found_among_a_models_outputs(how):
    def body(comm):
        step = build(comm, how)
        return [step(batch).loss for batch in Feed(Pairs(), step.plan, batch_size=10)]

    batch = {"x": torch.stack([Pairs()[i]["x"] for i in range(10)])}
    batch["labels"] = torch.tensor([Pairs()[i]["labels"] for i in range(10)])
    expected = own("dict")(**batch)["loss"].item()
    (single,) = threads.run(1, body)
    assert single == [pytest.approx(expected, rel=1e-12)]


def test_a_feed_makes_dict_batches_of_dict_samples():
    (batch,) = Feed(Texts(), Plan(), batch_size=SAMPLES, seed=0)
    assert sorted(batch.samples.sample_ids()) == list(range(SAMPLES))
    for name, values in whole().items():
        assert torch.equal(batch[name], values[batch.samples.sample_ids()])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (None, "sample 3 is None"),
        ("text", "sample 3 is a str"),
        (torch.zeros(2), "sample 3 is a Tensor"),
        ((torch.zeros(2),) * 3, "sample 3 is a tuple of 3"),
        (object(), "sample 3 is a object"),
        ({}, "sample 3 is an empty dict"),
        ({"text": "words", "labels": 1}, "sample 3 has a str as 'text'"),
        ({"x": None}, "sample 3 has a NoneType as 'x'"),
        ({"x": [1, [2, 3]]}, "sample 3 has a list as 'x'"),
    ],
)
def test_a_sample_of_another_form_is_refused_with_its_type_and_index(sample, message):
    class Some:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int, /) -> Any:
            return sample if index == 3 else {"x": 1.0}

    with pytest.raises(DataError) as caught:
        list(Feed(Some(), Plan(), batch_size=4))
    assert message in str(caught.value)


@pytest.mark.parametrize("dp", [1, 3])
def test_task_metrics_get_the_whole_batch_if_the_model_computes_its_loss(dp):
    def right(outputs: Any, batch: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
        return {"right": (int((outputs["logits"].argmax(1) == batch["labels"]).sum()), len(batch["labels"]))}

    def body(comm):
        step = build(comm)
        return evaluate(step, task(evaluate=right), Pairs(), 4).metrics

    one, *others = threads.run(dp, body)
    assert all(other == one for other in others)
    labels = torch.tensor([Pairs()[i]["labels"] for i in range(10)])
    outputs = own()(torch.stack([Pairs()[i]["x"] for i in range(10)]), labels)
    assert one["loss"] == pytest.approx(outputs["loss"].item(), rel=1e-12)
    assert one["right"] == pytest.approx((outputs["logits"].argmax(1) == labels).double().mean().item())


def test_a_task_with_a_models_own_loss_is_verified():
    verdict = verify(task(batch_size=7), Plan())
    assert verdict is not None
    assert verdict.max_deviation <= 1e-9


def test_a_loss_without_targets_and_targets_without_a_loss_are_refused():
    def with_loss(comm):
        step = TrainStep(own(), F.cross_entropy, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        with pytest.raises(TaskError, match="a batch of x, labels without targets") as caught:
            step({"x": torch.zeros(2, 4).double(), "labels": torch.tensor([0, 1])})
        assert "loss=None" in str(caught.value)

    def with_targets(comm):
        step = build(comm)
        with pytest.raises(TaskError, match=r"a batch \(inputs, targets\), and loss = None"):
            step((torch.zeros(2, 4).double(), torch.tensor([0, 1])))

    def without_labels(comm):
        step = build(comm)
        with pytest.raises(TaskError, match=r"outputs \(dict\) without a loss, of inputs x"):
            step({"x": torch.zeros(2, 4).double()})

    for body in (with_loss, with_targets, without_labels):
        threads.run(2, body)


def test_a_models_own_loss_is_refused_where_ranks_share_sequences():
    with pytest.raises(TaskError, match="cp = 2 and loss = None"):
        preflight(task(), Plan(cp=2))


def test_a_feed_of_pairs_gives_tuples():
    source = TensorSource(torch.randn(4, 4).double(), torch.arange(4) % 3)
    (batch,) = Feed(source, Plan(), batch_size=4, seed=0)
    assert isinstance(batch, tuple)
    assert [len(part) for part in batch] == [4, 4]


def test_concatenated_inputs_are_refused_with_the_names_whose_lengths_differ():
    def body(comm):
        step = TrainStep(
            nn.EmbeddingBag(9, 3), lambda o, y: o.square().sum(1), sgd, plan=Plan(), communicator=comm, clip=None
        )
        inputs = {"input": torch.arange(7), "offsets": torch.tensor([0, 2, 5])}
        with pytest.raises(TaskError, match=r"7 in inputs\['input'\], 3 in inputs\['offsets'\], 3 in targets"):
            step((inputs, torch.zeros(3)))

    threads.run(1, body)


def test_an_error_in_one_ranks_first_batch_is_reported_on_all_ranks():
    def body(comm):
        batch = {"x": torch.randn(4, 4, dtype=torch.float64), "labels": torch.arange(4) % 3}
        if comm.rank == 1:
            del batch["labels"]
        with pytest.raises(TaskError, match="without a loss, of inputs x"):
            build(comm)(batch)

    threads.run(2, body)


class ByHand(nn.Module):
    """Takes the mean of its losses itself: over the samples, or over those that have a label."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.over, self.layer = over, nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        values = F.cross_entropy(self.layer(x), labels, reduction="none")
        return {"loss": values.mean() if self.over == "samples" else values.sum() / (labels >= 0).sum()}


def test_a_models_mean_by_hand_over_labels_is_refused_before_one_is_missing_and_one_over_samples_is_trained():
    def body(comm):
        batch = {"x": torch.randn(4, 4), "labels": torch.arange(4) % 3}
        step = TrainStep(ByHand("samples"), None, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        step(batch)
        step = TrainStep(ByHand("labels"), None, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        with pytest.raises(TaskError, match=r"a scalar loss of .*, with more of -100 .* try return \(sum, count\)"):
            step(batch)

    threads.run(2, body)
