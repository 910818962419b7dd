"""Asks: the questions that come with Fourfold, one for each system that plans by itself.

Law: `ask:NAME` stands wherever the name of an ask's file may stand.
"""

from importlib import resources

from fourfold.words.errors import PlanError, Problem, closest_match

ASK_PREFIX = "ask:"
SUFFIX = ".toml"
ASKS = resources.files("fourfold") / "recipes" / "asks"


def ask_names() -> list[str]:
    """The names of all asks, in alphabetical order."""
    return sorted(file.name.removesuffix(SUFFIX) for file in ASKS.iterdir() if file.name.endswith(SUFFIX))


def ask_text(name: str) -> str:
    """An ask as TOML. Raises PlanError, with the closest name, if there is none of this name."""
    names = ask_names()
    if name not in names:
        close = closest_match(name, names)
        need = f"one of {', '.join(names)}"
        raise PlanError(Problem(f"{ASK_PREFIX}{name}", need, f"{ASK_PREFIX}{close or names[0]}"), where="the ask")
    return (ASKS / f"{name}{SUFFIX}").read_text(encoding="utf-8")
