"""Laws of docs/from-lightning.md: its task and its loop train as a plain loop of torch does."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import fourfold as ff
from tests.cases import SEED_LOCK

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "from_lightning.py"))
EPOCHS = {"task": 2, "loop": 10}  # those of the page's loop


def make_model() -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(3)
        return EXAMPLE["model"](32)


def plain_loop(epochs: int) -> tuple[nn.Module, list[float], float, float]:
    """What one device trains: the model, its losses, and the validation loss and error."""
    model, data = make_model(), EXAMPLE["data"]()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=16 * epochs)
    batches = ff.Feed(data.train, ff.Plan(), batch_size=64, seed=0)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    inputs, targets = data.valid.tensors
    errors = model(inputs).detach() - targets
    return model, losses, errors.square().mean().item(), errors.abs().mean().item()


def close(expected):
    return pytest.approx(expected, rel=1e-3)  # float32, and AdamW divides by small numbers


def test_the_task_of_the_page_trains_as_a_plain_loop(tmp_path):
    _, losses, valid_loss, valid_error = plain_loop(EPOCHS["task"])
    save_file(make_model().state_dict(), tmp_path / "init.safetensors")
    task = dataclasses.replace(EXAMPLE["task"](), epochs=EPOCHS["task"])
    options = {"folder": str(tmp_path), "init": str(tmp_path / "init.safetensors"), "checkpoint_every": 0}
    result = ff.train(task, ff.Plan(microbatches=2), quiet=True, name="run", **options)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines if "grad_norm" in line] == close(losses)
    assert result.valid == {"loss": close(valid_loss), "error": close(valid_error)}


def test_the_loop_of_the_page_trains_as_a_plain_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected, losses, *_ = plain_loop(EPOCHS["loop"])
    page = (ROOT / "docs" / "from-lightning.md").read_text(encoding="utf-8")
    block = page.partition("## A loop of your own")[2].partition("```python\n")[2].partition("```")[0]
    model, data = make_model(), EXAMPLE["data"]()
    names = {"ff": ff, "torch": torch, "loss": F.mse_loss, "model": model, "dataset": data.train}
    # One validation batch: the block keeps the loss of the last.
    names["valid"] = torch.utils.data.Subset(data.valid, range(64))
    exec(compile(block, "from-lightning.md", "exec"), names)
    assert names["metrics"].loss == close(losses[-1])
    inputs, targets = (tensor[:64] for tensor in data.valid.tensors)
    assert names["valid_loss"] == close(F.mse_loss(expected(inputs), targets).item())
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
