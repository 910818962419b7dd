"""Laws of settings: every use derives from one declaration, and the identity of old runs does not change."""

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fourfold as ff
from fourfold.cli.arguments import (
    SETTINGS,
    CommandSettings,
    command_line_settings,
    help_table,
)
from fourfold.plan.plan_fields import PLAN_FIELDS
from fourfold.trainer.run_identity import default_run_name, run_identity
from fourfold.trainer.settings import (
    TASK_FIELDS,
    Settings,
    TrainOptions,
    make_settings,
)
from fourfold.words.errors import SettingError
from fourfold.words.field import Field, Setting, declare, declared_problems, declared_settings, value_text

ROOT = Path(__file__).parents[2]
TASK = ff.Task(
    model=lambda: typing.cast(Any, None),
    loss=lambda outputs, targets: outputs,
    data=lambda: typing.cast(Any, None),
    optimizer=lambda parameters: typing.cast(Any, None),
    steps=10,
    batch_size=8,
    clip=1,
)


def markdown_table(settings: Mapping[str, Setting]) -> str:
    """The settings as docs/runs.md has them."""
    rows = [f"| `{name}` | {each.help} | {each.default_text} |" for name, each in settings.items()]
    return "\n".join(["| setting | meaning | default |", "|---|---|---|", *rows])


def plan_markdown_table() -> str:
    """The fields of a plan as docs/plan.md has them."""
    defaults = {name: value_text(each.default) or "none" for name, each in PLAN_FIELDS.items()}
    rows = [f"| `{name}` | {defaults[name]} | {values(each)} | {each.help} |" for name, each in PLAN_FIELDS.items()]
    return "\n".join(["| field | default | values | meaning |", "|---|---|---|---|", *rows])


def values(field: Field) -> str:
    if field.type is int and not field.choices:
        return f"≥ {field.minimum:g}" + (", or none" if field.is_optional else "")
    return ", ".join(f"`{each}`" for each in field.offered) or field.requirement()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithPatience(Settings):
    """The settings, and one more."""

    patience: int = declare(7, minimum=1, help="evaluations without progress", in_identity="if given")


def test_a_new_field_is_checked_parsed_listed_and_part_of_the_identity() -> None:
    given = {"steps": 1, "batch_size": 1, "clip": None}
    (problem,) = declared_problems(WithPatience(**given, patience=0))
    assert problem.got == "patience = 0"
    assert problem.need == "a whole number of at least 1"
    words = command_line_settings(WithPatience, CommandSettings)
    assert words["patience"].parse("3") == 3
    with pytest.raises(ValueError, match="0"):
        words["patience"].parse("0")
    assert "patience          evaluations without progress (7)" in help_table(words)
    assert "| `patience` | evaluations without progress | 7 |" in markdown_table(words)
    assert run_identity(WithPatience(**given, patience=3), ff.Plan())["patience"] == 3


def test_the_keywords_of_train_are_the_settings() -> None:
    options = typing.get_type_hints(TrainOptions)
    types = typing.get_type_hints(Settings)
    assert list(options) == list(types)
    for name, option in options.items():
        assert option == (types[name] | None if name in TASK_FIELDS else types[name]), name
    (keywords,) = (p for p in inspect.signature(ff.train).parameters.values() if p.kind is p.VAR_KEYWORD)
    assert keywords.annotation == typing.Unpack[TrainOptions]
    assert all(name in (ff.train.__doc__ or "") for name in options)


def test_the_documentation_lists_every_setting() -> None:
    assert markdown_table(SETTINGS) in (ROOT / "docs" / "runs.md").read_text()
    assert plan_markdown_table() in (ROOT / "docs" / "plan.md").read_text()


def test_every_default_passes_its_own_check() -> None:
    settings = make_settings(TASK)
    for name, declared in declared_settings(settings).items():
        assert not declared.problems(name, getattr(settings, name)), name
    assert len({each.help for each in SETTINGS.values()}) == len(SETTINGS)


PLAIN_IDENTITY = '{"task":"run","settings":{},"steps":10,"batch_size":8,"clip":1,"seed":0}'
FULL_IDENTITY = (
    '{"task":"mine.py:task","settings":{"lr":0.001,"width":null},"steps":20,"batch_size":8,"clip":0.5,"seed":3,'
    '"ema":0.9,"init":"w.safetensors","rates":{"schedule":"cosine","warmup":2},"dp":2,"sync":"local",'
    '"local_steps":2,"outer_lr":1.0,"outer_momentum":0.0,"precision":"bf16"}'
)


@pytest.mark.parametrize(("given", "plan", "identity", "name"), [
    ({}, ff.Plan(), PLAIN_IDENTITY, "run-85d628"),
    (
        {
            "steps": 20, "clip": 0.5, "seed": 3, "ema": 0.9, "init": "w.safetensors",
            "rates": ff.LRSchedule(schedule="cosine", warmup=2), "task_name": "mine.py:task", "run_prefix": "mine",
            "extra_settings": {"lr": 1e-3, "width": None},
        },
        ff.Plan(dp=2, sync="local", local_steps=2, precision="bf16"), FULL_IDENTITY, "run-39b20a",
    ),
])  # fmt: skip
def test_the_identity_of_a_run_is_the_one_that_older_versions_saved(given, plan, identity, name) -> None:
    found = run_identity(make_settings(TASK, **given), plan)
    assert msgspec.json.encode(found).decode() == identity
    assert default_run_name("run", found) == name


@pytest.mark.parametrize(("given", "attempt"), [
    ({"evaluate_evry": 2}, "evaluate_every"),
    ({"callback": []}, "callbacks"),
    ({"workers": 2}, "a DataLoader(…, num_workers=N) as the task's data"),
    ({"lr_warmup": 20}, "rates=ff.LRSchedule(warmup=…)"),
    ({"something": 3}, "help(ff.train)"),
])  # fmt: skip
def test_a_mistyped_keyword_of_train_is_refused_with_the_closest_name(given, attempt):
    with pytest.raises(SettingError) as refused:
        ff.train(TASK, **given)
    (problem,) = refused.value.problems
    assert problem.need == "a keyword of ff.train"
    assert problem.attempt == attempt
