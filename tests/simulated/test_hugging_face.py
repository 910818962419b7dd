"""transformers models as a user hands them over: with their own loss, an optimizer, samples that are dicts; no plan.

Models are made from small configurations: nothing is downloaded. Ranks are threads.
"""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fourfold as ff
from fourfold.comm import init
from fourfold.model.batch import num_tokens
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from tests.simulated.test_transformers import KeepFloat64, made

SAMPLES, LENGTH, BATCH_SIZE, SEED = 10, 8, 4, 3


class Ranks(threading.local):
    """The communicator of each thread."""

    comm: Any = None


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Each thread that sets `comm` is the rank that Fourfold finds."""
    found = Ranks()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that the test process keeps its number of threads
    monkeypatch.setattr(init, "init_communicator", lambda: found.comm)
    worlds = lambda: init.ProcessWorld(*(found.comm.rank, found.comm.size) if found.comm else (0, 1))  # noqa: E731
    monkeypatch.setattr(init, "world", worlds)
    return found


def texts() -> list[dict[str, Any]]:
    """Samples as a tokenizer returns them: lists of numbers. Some tokens are padding, and their labels are ignored."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(SAMPLES):
        tokens = torch.randint(0, 50, (LENGTH,), generator=generator)
        is_text = torch.arange(LENGTH) < LENGTH - number % 4
        labels = tokens.where(is_text, -100)
        samples.append(
            {"input_ids": tokens.tolist(), "attention_mask": is_text.long().tolist(), "labels": labels.tolist()}
        )
    return samples


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The usual groups: weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    # A large epsilon: gradients that are zero but for rounding would move weights at full speed.
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def train_alone(kind: str) -> oracle.TrainingResult:
    """Plain torch on the global batches."""
    model, losses = copy.deepcopy(made(kind)).train(), []
    optimizer = optimizer_of(model)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for batch in ff.Feed(texts(), batch_size=BATCH_SIZE, seed=SEED):
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return oracle.TrainingResult(losses, [], {name: p.detach().clone() for name, p in model.named_parameters()})


def test_the_tokens_of_a_batch_are_counted_by_ids_embeddings_or_labels():
    ids, embeddings, images = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 8), torch.zeros(2, 3, 4, 4)
    assert num_tokens({"input_ids": ids, "labels": ids[:, :2]}) == 6
    assert num_tokens({"inputs_embeds": embeddings, "attention_mask": ids}) == 6
    assert num_tokens({"inputs_embeds": embeddings[:, None].expand(2, 4, 3, 8), "labels": ids[:, 0]}) == 24
    assert num_tokens({"input_features": embeddings, "labels": ids}) == 6
    for labels in (ids[:, 0], torch.zeros(2, 3), images.long()):  # of samples, of classes, of pixels
        assert num_tokens({"pixel_values": images, "labels": labels}) == 0


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_model_with_its_own_loss_needs_no_adapter_and_no_plan(kind, ranks):
    def body(comm):
        ranks.comm, model = comm, copy.deepcopy(made(kind)).train()
        optimizer = optimizer_of(model)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        losses = []
        with KeepFloat64():
            step = ff.parallelize(model, None, optimizer)
            for batch in ff.Feed(texts(), batch_size=BATCH_SIZE, seed=SEED):
                metrics = step(batch)
                assert metrics.tokens == metrics.targets == metrics.samples * LENGTH
                losses.append(metrics.loss)
                scheduler.step()
        return step.plan.dp, oracle.snapshot(step, losses, [])

    with KeepFloat64():
        expected = train_alone(kind)
    assert len(expected.losses) == 3
    for dp, trained in threads.run(2, body):
        assert dp == 2
        assert oracle.deviation(trained, expected) <= TOLERANCE
