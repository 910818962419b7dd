"""Laws of examples/conversions: a conversion to Fourfold changes no more lines than one to Accelerate."""

import pytest

from tests import conversions


@pytest.mark.parametrize("name", conversions.NAMES)
def test_converting_a_script_changes_no_more_lines_than_accelerate_needs(name):
    plain, *converted = (conversions.script(name, kind).read_text() for kind in ("", "fourfold", "accelerate"))
    fourfold, accelerate = (conversions.num_changed_lines(plain, each) for each in converted)
    assert 0 < fourfold <= accelerate


def test_every_script_is_converted_and_run():
    files = {path.name for path in conversions.FOLDER.glob("*.py")}
    kinds = ("", *conversions.LAUNCHERS)
    assert files == {conversions.script(name, kind).name for name in conversions.NAMES for kind in kinds}


def test_changed_lines_are_those_that_are_removed_and_those_that_are_added():
    assert conversions.num_changed_lines("a\nb\nc\n", "a\n\nB\nc\nd\n") == 3
    assert conversions.num_changed_lines("a\nb\n", "a\nb\n") == 0


def test_the_page_shows_the_lines_that_change():
    page = (conversions.ROOT / "docs" / "from-accelerate.md").read_text(encoding="utf-8")
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    plain, converted = (conversions.script("loop", kind).read_text() for kind in ("", "fourfold"))
    changed = [line for line in shown if line.startswith(("+", "-"))]
    assert sorted(changed) == sorted(conversions.changed_lines(plain, converted))
    assert len(changed) == 8  # as the page says
    assert {line[1:] for line in shown if line.startswith(" ")} <= set(plain.splitlines())


EXPECTED = [("0", 0.5), ("1", 0.25)]
OTHERS = {
    "twice": EXPECTED + EXPECTED,
    "too few": EXPECTED[:1],
    "none": [],
    "another loss": [("0", 0.5), ("1", 0.252)],
    "nan": [("0", 0.5), ("1", float("nan"))],
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_training_is_not_taken_for_the_same(other):
    printed = "".join(f"epoch {epoch}: validation loss {loss}\n" for epoch, loss in EXPECTED)
    assert conversions.is_same_training(conversions.losses(printed), EXPECTED)
    assert not conversions.is_same_training(OTHERS[other], EXPECTED)
