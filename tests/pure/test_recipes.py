"""Recipes: their names stand wherever a plan file does."""

import dataclasses
import json
import sys

import pytest

from fourfold.cli import main
from fourfold.cli.plan.question import trained_task
from fourfold.cli.run import Run, resolve
from fourfold.plan.plan import Plan
from fourfold.plan.recipes import SHIPPED_PLANS, recipe_fields, recipe_summary
from fourfold.words.errors import FourfoldError, PlanError
from tests.jobs import parse_job, prepare_job


def test_a_recipe_is_the_plan_in_its_file_with_fields_of_ones_own():
    for name in SHIPPED_PLANS.names():
        assert Plan.recipe(name) == Plan.from_dict(recipe_fields(name))
    assert Plan.recipe("zero3", dp=4) == Plan(dp=4, zero=3, microbatches=2)
    with pytest.raises(PlanError, match=r"recipe:zero3\n.*dpp = 4 .*a field of the plan"):
        Plan.recipe("zero3", dpp=4)


def test_an_unknown_SHIPPED_PLANS_the_closest():
    for name in ("zer3", "../plan", "", "zero3.toml"):
        with pytest.raises(PlanError, match=f"recipe:{name} .*one of dapple, dct") as raised:
            Plan.recipe(name)
        assert name != "zer3" or "try recipe:zero3" in str(raised.value)


def test_every_recipe_is_accepted_for_the_built_in_tasks_as_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refused = []
    for name in SHIPPED_PLANS.names():
        job = prepare_job(["lm", f"recipe:{name}"])
        assert job.plan == Plan.recipe(name)
        try:
            prepare_job(["digits", f"recipe:{name}"])
        except (FourfoldError, ExceptionGroup):
            refused.append(name)
    # Images have no tokens to split, and a model of convolutions has no blocks of column and row layers.
    split = [name for name in SHIPPED_PLANS.names() if (plan := Plan.recipe(name)).cp * plan.tp > 1]
    assert refused == split


def test_ranks_get_the_run_of_every_recipe():
    for name in SHIPPED_PLANS.names():
        run = resolve(["lm", f"recipe:{name}", "lr=1e-3"])
        run = dataclasses.replace(run, decided=run.plan())
        assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_a_recipe_brings_settings_of_the_run_which_words_replace():
    for words, clip in (((), None), (("clip=2",), 2.0)):
        job = parse_job(["digits", "recipe:pipedream", *words])
        assert (job.task.clip, job.plan) == (clip, Plan.recipe("pipedream"))
        said = resolve(["digits", "recipe:pipedream", *words]).recipe_lines
        assert said == ([] if words else ["recipe:pipedream: clip = none"])
    source = trained_task(resolve(["lm", "recipe:pipedream"])).source
    assert source.update_spec.clip is None


def test_show_lists_the_recipes_and_prints_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["show", "recipe:"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"recipe:{name}" for name in SHIPPED_PLANS.names()]
    assert all(line.endswith(recipe_summary(line.split()[0].removeprefix("recipe:"))) for line in lines)
    assert all(map(recipe_summary, SHIPPED_PLANS.names()))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["show", "digits", "recipe:zero3", "dp=4"])
    out = capsys.readouterr().out
    assert "= 4 ranks\n" in out
    assert "zero = 3" in out
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["show", "digits", "recipe:zeros"])
    assert "try recipe:zero" in capsys.readouterr().err
