"""Recipes: the plans that come with Fourfold, one for each named system.

recipe   a file of `fourfold/recipes`: a plan, or with sections a settings file; its comment says which system it is
Law: `recipe:NAME` stands wherever the name of such a file may stand.
"""

import re
from importlib import resources
from typing import Any

from fourfold.plan.decode import from_toml
from fourfold.words.errors import PlanError, Problem, closest_match

RECIPE_PREFIX = "recipe:"
SUFFIX = ".toml"
RECIPES = resources.files("fourfold") / "recipes"


def recipe_names() -> list[str]:
    """The names of all recipes, in alphabetical order."""
    return sorted(file.name.removesuffix(SUFFIX) for file in RECIPES.iterdir() if file.name.endswith(SUFFIX))


def recipe_text(name: str) -> str:
    """A recipe as TOML. Raises PlanError, with the closest name, if there is none of this name."""
    names = recipe_names()
    if name not in names:
        close = closest_match(name, names)
        problem = Problem(f"{RECIPE_PREFIX}{name}", f"one of {', '.join(names)}", f"{RECIPE_PREFIX}{close or names[0]}")
        raise PlanError(problem, where="the plan")
    return (RECIPES / f"{name}{SUFFIX}").read_text(encoding="utf-8")


def recipe_fields(name: str) -> dict[str, Any]:
    """The fields of a recipe's plan. Raises PlanError."""
    table = from_toml(recipe_text(name))
    return {key: value for key, value in table.get("plan", table).items() if key != "version"}


def recipe_summary(name: str) -> str:
    """The first sentence of a recipe's comment, without the citations in it."""
    lines = [line.removeprefix("#").strip() for line in recipe_text(name).splitlines() if line.startswith("#")]
    return re.sub(r" \([^()]*\)", "", " ".join(lines)).partition(". ")[0].removesuffix(".")
