"""Every recipe is a plan with which the language model trains."""

import math
from pathlib import Path

import pytest

from fourfold.plan.plan import Plan
from tests.conftest import ROOT

MAX_PROCESSES = 4  # tests/simulated/test_large_recipes.py trains with the larger ones, on threads
FOLDER = ROOT / "src" / "fourfold" / "recipes"
PLANS = {path: Plan.from_toml(path.read_text()) for path in sorted(FOLDER.glob("*.toml"))}
RECIPES = [path for path, plan in PLANS.items() if plan.mesh.size <= MAX_PROCESSES]


def test_there_are_recipes():
    assert len(RECIPES) > 9


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_language_model_trains_with_a_recipe(recipe: Path, world, tmp_path: Path):
    ranks = world(PLANS[recipe].mesh.size)
    losses = ranks.run("tests.spawned.rank_functions:final_loss", recipe=str(recipe), folder=str(tmp_path))
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 1
