"""Every recipe is a plan with which the language model trains."""

import math
from pathlib import Path

import pytest

from fourfold.plan.plan import Plan
from fourfold.plan.recipes import SHIPPED_PLANS

MAX_PROCESSES = 4  # tests/simulated/test_large_recipes.py trains with the larger ones, on threads
RECIPES = [name for name in SHIPPED_PLANS.names() if Plan.recipe(name).mesh.size <= MAX_PROCESSES]


def test_there_are_recipes():
    assert len(RECIPES) > 9


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_language_model_trains_with_a_recipe(recipe: str, world, tmp_path: Path):
    ranks = world(Plan.recipe(recipe).mesh.size)
    losses = ranks.run("tests.spawned.rank_functions:final_loss", recipe=recipe, folder=str(tmp_path))
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 1
