"""Laws of fields: a value is read, checked and written by the same rule wherever it is given."""

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cli import feed_bench, feed_pack
from fourfold.cli.arguments import SETTINGS
from fourfold.cli.plan.arguments import OWN_WORDS
from fourfold.cli.plan.question import GPT_FIELDS
from fourfold.plan.decode import format_value
from fourfold.plan.plan_fields import PLAN_FIELDS
from fourfold.planner.predict.clusters import FIELDS as CLUSTER_FIELDS
from fourfold.words.errors import SettingError
from fourfold.words.field import Field, value_text

DECLARED = [PLAN_FIELDS, SETTINGS, OWN_WORDS, GPT_FIELDS, CLUSTER_FIELDS, feed_bench.WORDS, feed_pack.WORDS]
BOUNDS = st.none() | st.integers(-3, 3)
NUMBERS = st.integers(-5, 5) | st.floats(-5, 5).map(lambda value: round(value, 2))
VALUES = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "b", "true", "3"])


@st.composite
def fields(draw: st.DrawFn) -> Field:
    kind = draw(st.sampled_from([bool, int, float, str]))
    choices = draw(st.sampled_from([(), (1, 2), ("a", "b")])) if kind in (int, str) else ()
    choices = tuple(each for each in choices if type(each) is kind)
    sides = (draw(st.sampled_from(side)) for side in (("minimum", "above"), ("maximum", "below")))
    bounds: dict[str, Any] = {name: draw(BOUNDS) for name in sides} if kind in (int, float) else {}
    return Field(type=kind, choices=choices, is_optional=draw(st.booleans()), **bounds)


@given(field=fields(), value=VALUES)
def test_a_value_is_legal_in_python_in_a_file_and_as_a_word_or_in_none_of_them(field: Field, value: object) -> None:
    is_legal = field.accepts(value)
    assert bool(field.problems("x", value)) == (not is_legal)
    if not is_legal:
        if value is not None and not (field.type is int and isinstance(value, float)):  # 2.0 is a whole number in TOML
            with pytest.raises(ValueError, match=r".*"):
                field.convert(tomllib.loads(f"x = {format_value(value)}")["x"])
        if type(value) is field.type:
            with pytest.raises(SettingError, match="need "):
                field.read("x", value_text(value))
        return
    assert field.read("x", value_text(value)) == value
    assert (
        field.convert(tomllib.loads(f"x = {format_value(value_text(value) if value is None else value)}")["x"]) == value
    )


@given(field=fields())
def test_what_is_needed_is_said_with_every_bound(field: Field) -> None:
    need = field.requirement()
    for bound in (field.minimum, field.above, field.maximum, field.below) if not field.choices else ():
        assert bound is None or f"{bound:g}" in need
    assert (", or none" in need) == field.is_optional


@pytest.mark.parametrize("declared", DECLARED, ids=["plan", "run", "fourfold plan", "gpt", "cluster", "bench", "pack"])
def test_every_default_is_legal(declared: dict[str, Field]) -> None:
    for name, field in declared.items():
        has_default = isinstance(field.default, str | int | float | bool | None)
        # Zero stands for "not known" where a number of a cluster must be above it.
        assert not has_default or field.default in (None, 0) or field.dimension or field.accepts(field.default), name


def test_no_text_of_any_length_is_read_in_more_than_linear_time_or_shown_whole() -> None:
    with pytest.raises(SettingError) as refused:
        Field(type=int, minimum=1).read("x", "9" * 5000)
    assert len(str(refused.value)) < 200
    with pytest.raises(SettingError):
        Field(type=int).read("x", "1e400")
    assert math.isinf(Field(type=float).read("x", "inf"))
