"""Every recipe is a plan with which the language model trains."""

import dataclasses
import math
from pathlib import Path

import pytest

from fourfold.plan.plan import Plan
from tests.conftest import ROOT

MAX_RANKS = 8
RECIPES = sorted((ROOT / "src" / "fourfold" / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert len(RECIPES) > 17


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_language_model_trains_with_a_recipe(recipe: Path, world, tmp_path: Path):
    plan = Plan.from_toml(recipe.read_text())
    # Sixteen processes are too many for two cores.
    fields = {} if plan.mesh.size <= MAX_RANKS else {"dp": 1}
    size = dataclasses.replace(plan, **fields).mesh.size
    function = "tests.spawned.rank_functions:final_loss"
    losses = world(size).run(function, recipe=str(recipe), folder=str(tmp_path), **fields)
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 1
