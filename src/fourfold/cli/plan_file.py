"""Plan file: the text of a plan, in a file or of a recipe."""

from pathlib import Path

from fourfold.cli.errors import nearest_file
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.plan.recipes import RECIPE_PREFIX, recipe_text
from fourfold.words.errors import PlanError, Problem, os_error_text


def read_plan_text(file: str) -> str:
    """The text of a plan's file, or of recipe:NAME. Raises PlanError."""
    if file.startswith(RECIPE_PREFIX):
        return recipe_text(file.removeprefix(RECIPE_PREFIX))
    try:
        return read_bounded(Path(file)).decode()
    except DecodeError as error:
        raise PlanError(Problem(f"{file} has {error}", "a plan in TOML"), where=file) from None
    except OSError as error:
        close = nearest_file(Path(file), "*.toml")
        raise PlanError(Problem(f"{file} ({os_error_text(error)})", "a file", close)) from None
    except UnicodeDecodeError:
        raise PlanError(Problem(f"{file} is not a text file", "TOML in UTF-8"), where=file) from None
