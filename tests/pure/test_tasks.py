"""Laws of the built-in tasks: what a logit may depend on, what the losses are, which settings are refused."""

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.feed.source import fetch
from fourfold.tasks import digits, lm, text
from fourfold.words.errors import DataError, SettingError, TaskError

SMALL: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "length": 16}


def small_model(**settings: float) -> torch.nn.Module:
    torch.manual_seed(0)
    return lm.task(**{**SMALL, **settings}).model().double()


def batch_of_bytes(*, num_samples: int = 3, length: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (num_samples, length), generator=generator)
    return {"tokens": tokens, "positions": torch.arange(length).expand(num_samples, -1)}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_later_token_changes_no_earlier_logit(kv_heads: int):
    model, batch = small_model(kv_heads=kv_heads), batch_of_bytes()
    before = model(**batch)
    assert before.shape == (3, 16, 256)
    batch["tokens"][:, 9] = (batch["tokens"][:, 9] + 1) % 256
    after = model(**batch)
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=1e-12)
    assert all((after[:, i] != before[:, i]).any() for i in range(9, 16))


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_depends_only_on_relative_positions(kv_heads: int):
    model, batch = small_model(kv_heads=kv_heads), batch_of_bytes()
    before = model(**batch)
    shifted = model(batch["tokens"], batch["positions"] + 1000)
    torch.testing.assert_close(shifted, before, rtol=0, atol=1e-9)
    stretched = model(batch["tokens"], batch["positions"] * 2)
    assert (stretched - before).abs().max() > 1e-3


def test_rotary_embeddings_of_large_positions_stay_precise_in_bf16():
    positions = torch.tensor([[100_000, 100_001]])
    for actual, exact in zip(
        *(lm.rotary_cos_sin(positions, 8, dtype=d) for d in (torch.bfloat16, torch.float64)), strict=True
    ):
        torch.testing.assert_close(actual.double(), exact, rtol=0, atol=0.02)


def test_dropout_drops_in_training_only():
    batch, plain, dropped = batch_of_bytes(), small_model(), small_model(dropout=0.5)
    assert torch.equal(plain(**batch), dropped.eval()(**batch))
    assert not torch.allclose(dropped.train()(**batch), dropped(**batch))
    with pytest.raises(SettingError, match="dropout = 1"):
        lm.task(dropout=1.0)


def test_grouped_query_attention_equals_attention_with_repeated_keys_and_values():
    """Grouped-query attention is attention whose heads within a group have the same keys and values."""
    shared, full = (lm.Attention(32, heads=4, kv_heads=n).double() for n in (2, 4))
    q, k, v = shared.qkv.weight.detach().unflatten(0, (8, 8)).split((4, 2, 2))
    weight = torch.cat([q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)]).flatten(0, 1)
    full.load_state_dict({"qkv.weight": weight, "out.weight": shared.out.weight})
    x = torch.randn(2, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    angles = lm.rotary_cos_sin(torch.arange(16).expand(2, -1), 8, dtype=torch.float64)
    torch.testing.assert_close(shared(x, *angles), full(x, *angles), rtol=0, atol=1e-12)


def test_every_parameter_gets_a_gradient():
    task = lm.task(**SMALL)
    model, batch = small_model(), batch_of_bytes()
    assert task.loss is not None
    task.loss(model(**batch), batch["tokens"]).mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_the_loss_is_in_nats_per_token_and_the_metric_in_bits_per_byte():
    task = lm.task(**SMALL)
    logits = torch.randn(3, 16, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    targets = batch_of_bytes()["tokens"]
    nats = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert task.loss is not None
    torch.testing.assert_close(task.loss(logits, targets), nats)
    assert task.evaluate is not None
    total, count = task.evaluate(logits, targets)["bits per byte"]
    assert count == 48
    torch.testing.assert_close(total, nats.sum() / math.log(2))


def test_the_learning_rate_warms_up_linearly_and_decays_as_a_cosine():
    rates = [text.schedule(step, 100, warmup=0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx((1 + text.MIN_LR_FACTOR) / 2)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert 0 < rates[-1] < 0.03
    for steps in (1, 2, 3):
        assert all(0 < text.schedule(step, steps, warmup=0.05) <= 1 for step in range(steps))
        assert all(0 < digits.schedule(step, steps) <= 1 for step in range(steps))


def test_weight_decay_applies_to_matrices_only():
    task, model = lm.task(**SMALL, weight_decay=0.3), small_model()
    decayed, undecayed = task.optimizer(model.parameters()).param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert decayed["weight_decay"] == 0.3
    assert {p.ndim for p in undecayed["params"]} == {1}
    assert undecayed["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(undecayed["params"]) == len(list(model.parameters()))


def test_generated_text_is_deterministic_and_printable():
    settings: dict[str, Any] = {"prompt": "def ", "length": 16, "temperature": 1.0, "num_bytes": 60}
    model = small_model()
    state = torch.random.get_rng_state()
    text = lm.generate(model, **settings)
    assert text == lm.generate(model, **settings) != lm.generate(model, **settings, seed=1)
    assert text.startswith("def ")
    assert 30 < len(text) <= 64
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training


def test_a_few_steps_on_the_standard_library_lower_the_loss():
    task = lm.task(**SMALL, steps=30, lr=1e-2)
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    optimizer = task.optimizer(model.parameters())
    assert data.valid is not None
    inputs, targets = fetch(data.valid, range(len(data.valid)))
    with torch.no_grad():
        assert task.loss is not None
        before = task.loss(model(**inputs), targets).mean()
    for step in range(30):
        train_inputs, train_targets = fetch(data.train, range(16 * step, 16 * step + 16))
        task.loss(model(**train_inputs), train_targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert task.loss(model(**inputs), targets).mean() < before - 1


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"width": 30, "heads": 4}, ["width = 30"]),
        ({"heads": 4, "kv_heads": 3}, ["kv_heads = 3"]),
        ({"width": 36, "heads": 4, "kv_heads": 3}, ["width = 36", "kv_heads = 3"]),
        ({"layers": 0, "length": -1}, ["layers = 0", "length = -1"]),
        ({"warmup": 1.5, "lr": 0.0}, ["lr = 0.0", "warmup = 1.5"]),
    ],
)
def test_invalid_task_settings_are_reported_all_at_once(settings: dict[str, Any], names: list[str]):
    with pytest.raises(SettingError) as caught:
        lm.task(**settings)
    assert len(caught.value.problems) == len(names)
    for problem, name in zip(caught.value.problems, names, strict=True):
        assert name in problem.got
        assert problem.need


def test_text_that_is_missing_or_too_short_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="nothing at"):
        lm.task(data=str(tmp_path / "missing"))
    book = tmp_path / "book"
    book.write_bytes(b"x" * 100)
    with pytest.raises(DataError) as caught:
        lm.task(data=str(book), length=200).data()
    assert len(caught.value.problems) == 2
    with pytest.raises(DataError) as caught:
        lm.task(data=str(book), length=16).data()
    assert len(caught.value.problems) == 1


def test_digits_reach_97_percent_accuracy():
    pytest.importorskip("sklearn")
    task = digits.task(steps=60, channels=16, lr=1e-2)
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    optimizer = task.optimizer(model.parameters())
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: digits.schedule(step, 60))
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0)).repeat(8)
    for rows in order[: 60 * (task.batch_size or 0)].view(60, -1).tolist():
        images, classes = fetch(data.train, rows)
        assert task.loss is not None
        values = task.loss(model(images), classes)
        assert values.shape == classes.shape
        values.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    assert data.valid is not None
    assert task.evaluate is not None
    images, classes = fetch(data.valid, range(len(data.valid)))
    correct, count = task.evaluate(model(images), classes)["accuracy"]
    assert count == len(data.valid) == 359
    assert len(data.train) == 1797 - 359
    assert correct / count > 0.97


def test_digits_refuse_invalid_channels_and_report_a_missing_package(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingError, match="channels = 12"):
        digits.task(channels=12)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match="need its images of digits   try pip install scikit-learn"):
        digits.task()
