"""Laws of the pages: what they show is what CI runs."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("system", ["ddp", "horovod", "deepspeed"])
def test_a_page_shows_the_example_that_ci_runs(system):
    page = (ROOT / "docs" / f"from-{system}.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / f"from_{system}.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```\n" in page


@pytest.mark.parametrize("name", ["rates", "sequence"])
def test_a_picture_of_the_docs_is_what_its_script_draws(name):
    script = next((ROOT / "docs").glob(f"{name}*.py"))
    picture = script.with_name(script.stem.replace("_", "-") + ".svg")
    assert runpy.run_path(str(script))["draw"]() == picture.read_text(encoding="utf-8")
