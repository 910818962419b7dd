"""Bad input of the tensor axis: all problems at once, before a process starts."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.cli.run_commands import show
from fourfold.words.errors import FourfoldError
from tests.jobs import parse_job, prepare_job

MODELS = """
import torch
from torch import nn

import fourfold as ff


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 18), nn.Linear(18, 6), nn.LayerNorm(6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight


def mlp():
    return of(lambda: nn.Sequential(MLP(), MLP()), {"*.up": "mlp:tp, model", "*.down": "model, mlp"})


def whole():
    return of(lambda: nn.Sequential(MLP()), {})


def tied():
    return of(Tied, {"a": "column", "b": "row"})


def of(model, rules):
    return ff.Task(
        model=model,
        loss=nn.MSELoss(reduction="none"),
        data=lambda: ff.Data(train=[(torch.zeros(6), torch.zeros(6))] * 8),
        optimizer=torch.optim.AdamW,
        tensor=rules,
        steps=2,
        batch_size=8,
    )
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(tmp_path)
    Path("mine.py").write_text(MODELS)
    Path("rules.toml").write_text('"*.up" = "column"\n"0.up" = "column"\n"*.dwn" = "row"\n"*.norm" = "column"\n')
    yield
    os.chdir(before)


@pytest.mark.parametrize(("words", "parts"), [
    ("lm tp=3 heads=4", ["heads = 4, tp = 3 need heads divisible by tp try tp = 2 or 4",
                         '"blocks.*.mlp.down" has 352 inputs, tp = 3']),
    ("lm cp=2 tp=2 ulysses=2 kv_heads=2", ["a tensor rank has 2 heads, 1 kv_heads need each divisible by ulysses"]),
    ("lm tp=2 dims=head:tp", ['dims has "head:tp"', "try heads:tp"]),
    ("mine.py:mlp tp=4", ['"*.up" has 18 outputs, tp = 4', '"*.down" has 18 inputs, tp = 4', "try tp = 2, 3, 6 or 9"]),
    ("mine.py:mlp tp=2 dims=mlp:tp~model:tp", ["and mlp and model are on tp need one dim of a weight on an axis"]),
    ("mine.py:mlp tp=2 tensor=rules.toml zero=3 codec=int8",
     ['"*.dwn" matches no module', 'try "*.down"', '"*.up" and "0.up" match the same layer',
      "modules of class LayerNorm", 'codec = "int8" with zero = 3']),
    ("mine.py:tied tp=2", ['a.weight and b.weight are one parameter; a is "column", b is "row"']),
    ("mine.py:whole tp=2", ["tp = 2, and no rule splits a layer need rules for the layers to split"]),
])  # fmt: skip
def test_all_problems_are_reported_before_a_process_starts(words, parts):
    with pytest.raises((FourfoldError, ExceptionGroup)) as caught:
        prepare_job([word.replace("~", " ") for word in words.split()], has_run_dir=False)
    error = caught.value
    text = " ".join(" ".join(map(str, error.exceptions if isinstance(error, ExceptionGroup) else [error])).split())
    for part in parts:
        assert part in text


def test_the_rules_of_a_file_are_those_that_show_prints(capsys):
    Path("own.toml").write_text('"*.up" = "column"\n"*.down" = "row"')
    show(["mine.py:whole", "tp=2", "tensor=own.toml"])
    assert "6 × 18" in capsys.readouterr().out.partition("row")[2], "the weight of the row layer"
    job = parse_job(["mine.py:whole", "tp=2", "tensor=own.toml"])
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "config.toml").write_text(job.settings["config_text"])
    Path("own.toml").unlink()
    again = prepare_job([str(job.run_dir / "config.toml")], has_run_dir=False)
    assert again.task.tensor == job.task.tensor, "the folder is all it needs"
