"""Laws of the documentation: what it shows runs."""

import dataclasses
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fourfold as ff
from fourfold.axes.tensor.rules.styles import parse_rules, read_rules
from fourfold.cli.commands import parse_command
from fourfold.cli.run import resolve
from fourfold.cli.settings_file import read_settings_file
from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import load_cluster
from fourfold.words import callback as words
from fourfold.words.errors import FourfoldError

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = {path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")}
# A script of another framework, before it is converted: it needs a world of that framework.
BEFORE = re.compile(r"^## Before$.*?^```python$.*?^```$", re.MULTILINE | re.DOTALL)
# Its blocks are one script: the first block makes every name that the differences and the later blocks use.
ONE_SCRIPT = ROOT / "docs" / "quickstart.md"
# Their blocks are parts of scripts, which other tests run.
IN_SCRIPTS = {("from-ddp.md", "python"), ("from-accelerate.md", "diff")}


def blocks(page: Path, language: str) -> list[str]:
    if (page.name, language) in IN_SCRIPTS:
        return []
    text = BEFORE.sub("", page.read_text(encoding="utf-8"))
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for each, block in fenced if each == language]


def surroundings() -> dict[str, Any]:
    """What the short blocks use without making it."""
    torch.manual_seed(0)
    source = [(torch.randn(16), torch.tensor(index % 10)) for index in range(128)]
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))
    loss = functools.partial(F.cross_entropy, reduction="none")
    return {
        "config": config,
        "dataset": source,
        "feed": ff.Feed(source, Plan(), batch_size=32),
        "F": F,
        "ff": ff,
        "functools": functools,
        "loader": torch.utils.data.DataLoader(source, batch_size=32, shuffle=True),  # type: ignore[arg-type]
        "loss": loss,
        "model": model,
        "plan": Plan(),
        "source": source,
        "task": ff.Task(
            model=lambda: nn.Linear(16, 10),
            loss=loss,
            data=lambda: ff.Data(train=source, valid=source[:32]),
            optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        ),
        "step": ff.parallelize(model, loss, functools.partial(torch.optim.AdamW, lr=1e-3)),
        "texts": list(torch.randint(0, 64, (64, 8))),
        "torch": torch,
        "transformers": transformers,
        "valid": source[:32],
    }


def namespace(page: Path) -> dict[str, Any]:
    """What a block of a page may use."""
    if page != ONE_SCRIPT:
        return surroundings()
    names: dict[str, Any] = {}
    exec(compile(blocks(page, "python")[0], page.name, "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_every_python_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = namespace(page)
    for block in blocks(page, "python"):
        if block in EXAMPLES:
            compile(block, page.name, "exec")  # `.ci/run` runs it
            continue
        exec(compile(block, page.name, "exec"), names if page == ONE_SCRIPT else namespace(page))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "diff")], ids=lambda page: page.name)
@pytest.mark.parametrize("other", ["+", "-"])
def test_both_sides_of_every_difference_run(page, other):
    for block in blocks(page, "diff"):
        lines = [line[2:] for line in block.splitlines() if not line.startswith(other)]
        exec(compile("\n".join(lines), page.name, "exec"), namespace(page))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.name)
def test_every_toml_block_of_a_page_is_read_or_shown_with_its_error(page, tmp_path):
    for block in blocks(page, "toml"):
        if block.lstrip().startswith('"'):  # a file of tensor rules
            assert parse_rules(read_rules(block))[1] == []
            continue
        file = tmp_path / "file.toml"
        if "devices_per_host" in block:
            file.write_text(block)
            assert load_cluster(str(file)).num_devices
            continue
        if re.search(r"^devices =", block, re.MULTILINE):
            assert Ask.from_toml(block).devices
            continue
        file.write_text(block if re.search(r"^version|^\[", block, re.MULTILINE) else f"version = 1\n{block}")
        message = ""
        try:
            settings = read_settings_file(str(file))
            if settings is None:
                Plan.from_toml(file.read_text())
            else:
                settings.parse(None)
        except FourfoldError as error:
            message = str(error).partition("\n")[2]  # without the file's name
        assert message in page.read_text(encoding="utf-8")


def commands(page: Path) -> list[str]:
    """The lines of shell blocks that call `fourfold`, without prompts, comments and what another launcher takes."""
    lines = "\n".join([*blocks(page, "sh"), *blocks(page, "")]).replace("\\\n", " ").splitlines()
    found = [re.search(r"(?:^(?:\$ )?|&& |-m )(fourfold (?:(?!&&|\s#| {2,}).)*)", line) for line in lines]
    return [match[1] for match in found if match and "…" not in match[1]]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_every_command_of_a_page_is_one_that_fourfold_accepts(page):
    for line in commands(page):
        command = parse_command(shlex.split(re.sub(r"\[.*?\]", "", line))[1:])  # without what may be left out
        if isinstance(command, functools.partial) and command.func.__name__ in ("train", "show", "verify"):
            resolve(command.args[0])


def test_pages_list_the_fields_of_metrics_and_of_every_event():
    def fields(kind):
        return [each.name for each in dataclasses.fields(kind)]

    listed = (ROOT / "docs" / "task.md").read_text().partition("returns `ff.Metrics`: ")[2].partition(". ")[0]
    assert re.findall(r"`(\w+)`", listed) == fields(ff.Metrics)
    rows = re.findall(r"\| `on_(\w+)\(event\)` \|.*\| (.*) \|", (ROOT / "docs" / "callbacks.md").read_text())
    assert [name for name, _ in rows] == ["start", "step", "evaluate", "checkpoint", "fault", "end"]
    for name, listed in rows:
        assert re.findall(r"`(\w+)`", listed) == fields(getattr(words, f"{name.capitalize()}Event")), name
