"""Every recipe is a plan with which the language model trains."""

import math
from pathlib import Path

import pytest

from fourfold.plan.plan import Plan
from tests.conftest import ROOT

RECIPES = sorted((ROOT / "src" / "fourfold" / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert len(RECIPES) > 9


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_language_model_trains_with_a_recipe(recipe: Path, world, tmp_path: Path):
    size = Plan.from_toml(recipe.read_text()).mesh.size
    losses = world(size).run("tests.spawned.rank_functions:final_loss", recipe=str(recipe), folder=str(tmp_path))
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 1
