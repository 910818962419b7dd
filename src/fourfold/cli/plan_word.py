"""`plan=auto`, or a plan's file, among the words of a training; nothing here imports more than the words need."""

from collections.abc import Sequence
from pathlib import Path

from fourfold.cli.arguments import PLAN_WORD
from fourfold.cli.errors import nearest_file
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.plan.recipes import RECIPE_PREFIX, recipe_text
from fourfold.words.errors import PlanError, Problem, SettingError, os_error_text

# ---- plan file -----------------------------------------------------------------------------------------------------


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


# ---- `plan=auto` among the words of a training; nothing here imports more than the words need ----------------------


AUTO = "auto"
PLAN_AUTO = f"{PLAN_WORD}={AUTO}"


def wants_plan(words: Sequence[str]) -> bool:
    """Whether the words ask for a plan. Raises SettingError for another value than auto."""
    texts = [word.partition("=")[2] for word in words if word.startswith(f"{PLAN_WORD}=")]
    for text in texts:
        if text != AUTO:
            need = f"{AUTO}; a plan's file is a word of its own"
            attempt = text if text.endswith(".toml") else PLAN_AUTO
            raise SettingError(Problem(f"{PLAN_WORD} = {text or '(nothing)'}", need, attempt), where="the command line")
    return bool(texts)


def training_words(words: Sequence[str]) -> list[str]:
    """The words of a training without those that only the planner reads."""
    if not wants_plan(words):
        return list(words)
    from fourfold.cli.settings_file import is_ask

    return [word for word in words if word.partition("=")[2] != AUTO and not is_ask(word)]
