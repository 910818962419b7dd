"""Laws of the documentation: the code and the pictures that it shows are those that CI runs."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(("page", "example"), [
    ("from-ddp", "from_ddp"),
    ("from-horovod", "from_horovod"),
    ("from-deepspeed", "from_deepspeed"),
    ("task", "own_task"),
])  # fmt: skip
def test_a_page_shows_the_example_that_ci_runs(page, example):
    page = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```\n" in page


@pytest.mark.parametrize("name", ["rates", "sequence"])
def test_a_picture_of_the_docs_is_what_its_script_draws(name):
    script = next((ROOT / "docs").glob(f"{name}*.py"))
    picture = script.with_name(script.stem.replace("_", "-") + ".svg")
    assert runpy.run_path(str(script))["draw"]() == picture.read_text(encoding="utf-8")
