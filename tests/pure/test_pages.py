"""Laws of the documentation: the code and the pictures that it shows are those that CI runs."""

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer

import fourfold
from fourfold.cli import commands
from fourfold.words import errors

ROOT = Path(__file__).parent.parent.parent
# Not the changelog and the measurements: they also name what was there once.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs" / "measured-notes.md")


@pytest.mark.parametrize(("page", "example"), [
    ("from-ddp", "from_ddp"),
    ("from-horovod", "from_horovod"),
    ("from-deepspeed", "from_deepspeed"),
    ("from-lightning", "from_lightning"),
    ("task", "own_task"),
    ("checkpoints", "resume"),
    ("callbacks", "own_callback"),
])  # fmt: skip
def test_a_page_shows_the_example_that_ci_runs(page, example):
    page = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```\n" in page


@pytest.mark.parametrize("name", ["rates", "context", "tensor", "one_task", "feed", "pipeline", "four", "planner"])
def test_a_picture_of_the_docs_is_what_its_script_draws(name):
    script = next((ROOT / "docs").glob(f"{name}*.py"))
    picture = script.with_name(script.stem.replace("_", "-") + ".svg")
    assert runpy.run_path(str(script))["draw"]() == picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    names = set(re.findall(r"`((?:[\w-]+/)+\w+\.py)`", page.read_text(encoding="utf-8")))
    folders = (ROOT, ROOT / "src", ROOT / "src" / "fourfold")
    missing = {name for name in names if not any((folder / name).exists() for folder in folders)}
    assert {name for name in missing if "NAME" not in name} == set()


def sections(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in (each for each in links if not each.startswith("http")):
        path, _, section = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not section or section in sections(target), link


def test_every_message_that_troubleshooting_explains_is_in_the_code():
    """In a heading, "need" is the column of the message and "…" stands for values."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").split("## On the machine")[0]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    headings = re.findall(r"^### (?:need )?(.+)$", text, re.MULTILINE)
    assert headings
    patterns = {heading: ".*".join(map(re.escape, heading.split("…"))) for heading in headings}
    assert [heading for heading, pattern in patterns.items() if not re.search(pattern, source)] == []


def test_every_message_of_the_dry_run_that_the_task_page_explains_is_in_the_code():
    """In a row, "…" stands for values."""
    text = (ROOT / "docs" / "task.md").read_text(encoding="utf-8").partition("| message |")[2].partition("\n\n")[0]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/fourfold").rglob("*.py"))
    messages = re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
    assert messages
    patterns = {message: ".*".join(map(re.escape, message.strip("… ").split("…"))) for message in messages}
    assert [message for message, pattern in patterns.items() if not re.search(pattern, source)] == []


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: fourfold\.(\w+)$", text, re.MULTILINE)) == set(fourfold.__all__)


def test_the_command_reference_has_every_command_and_option():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    hook = runpy.run_path(str(ROOT / "docs" / "_site" / "command_reference.py"))["on_page_markdown"]
    text = hook(page, page=None, config=None, files=None)
    app: Any = typer.main.get_command(commands.app)
    assert text != page
    assert set(re.findall(r"^## fourfold (\w+)$", text, re.MULTILINE)) == set(commands.COMMANDS) == set(app.commands)
    options = {option for command in app.commands.values() for each in command.params for option in each.opts}
    assert [each for each in options if each.startswith("-") and f"`{each}" not in text] == []
    assert re.findall(r"\x08|\{settings\}", text) == []


def test_the_reference_has_every_error_of_the_public_functions():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    classes = {name for name, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)}
    found = set(re.findall(r"^::: fourfold\.(?:words\.errors\.)?(\w+Error|DamagedSample)$", text, re.MULTILINE))
    assert found == classes
