"""Recipes: the plans that come with Fourfold, one for each named system, and the asks.

recipe   a file of `fourfold/recipes`: a plan, or with sections a settings file; its comment says which system it is
Law: `recipe:NAME` and `ask:NAME` stand wherever the name of such a file may stand.
"""

import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from fourfold.plan.decode import from_toml
from fourfold.words.errors import PlanError, Problem, closest_match

RECIPE_PREFIX, ASK_PREFIX = "recipe:", "ask:"
SUFFIX = ".toml"
RECIPES = resources.files("fourfold") / "recipes"


class ShippedFiles(NamedTuple):
    """TOML files that come with Fourfold: `prefix` and NAME stand wherever the name of such a file may stand."""

    prefix: str
    folder: Traversable
    where: str

    def names(self) -> list[str]:
        """All names, in alphabetical order."""
        return sorted(each.name.removesuffix(SUFFIX) for each in self.folder.iterdir() if each.name.endswith(SUFFIX))

    def text(self, name: str) -> str:
        """A file as TOML. Raises PlanError, with the closest name, if there is none of this name."""
        if name not in (names := self.names()):
            attempt = f"{self.prefix}{closest_match(name, names) or names[0]}"
            problem = Problem(f"{self.prefix}{name}", f"one of {', '.join(names)}", attempt)
            raise PlanError(problem, where=self.where)
        return (self.folder / f"{name}{SUFFIX}").read_text(encoding="utf-8")


SHIPPED_PLANS = ShippedFiles(RECIPE_PREFIX, RECIPES, "the plan")
SHIPPED_ASKS = ShippedFiles(ASK_PREFIX, RECIPES / "asks", "the ask")


def recipe_fields(name: str) -> dict[str, Any]:
    """The fields of a recipe's plan. Raises PlanError."""
    table = from_toml(SHIPPED_PLANS.text(name))
    return {key: value for key, value in table.get("plan", table).items() if key != "version"}


def recipe_summary(name: str) -> str:
    """The first sentence of a recipe's comment, without the citations in it."""
    lines = [line.removeprefix("#").strip() for line in SHIPPED_PLANS.text(name).splitlines() if line.startswith("#")]
    return re.sub(r" \([^()]*\)", "", " ".join(lines)).partition(". ")[0].removesuffix(".")
