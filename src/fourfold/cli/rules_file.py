"""Rules file: the rules of the tensor axis, in a TOML file that a command or a settings file names.

Law: what a file holds is checked here, as text; whether its patterns fit the model is checked with the model.
"""

from collections.abc import Mapping
from pathlib import Path

from fourfold.axes.tensor.rules.styles import read_rules
from fourfold.cli.arguments import RULES_WORD
from fourfold.cli.errors import is_file, nearest_file
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.words.errors import PlanError, Problem, os_error_text

NEED = "a TOML file of tensor rules"


def read_rules_setting(given: str | Mapping[str, str] | None) -> dict[str, Mapping[str, str]]:
    """The setting `tensor` with the rules themselves: those of the file that it names. Empty if it is not given.

    Raises PlanError with all problems of the file.
    """
    if given is None:
        return {}
    return {RULES_WORD: _read(given) if isinstance(given, str) else given}


def check_rules_path(name: str) -> None:
    """Raise PlanError for a file that is not there."""
    path, setting = Path(name), f"{RULES_WORD} = {name or '(nothing)'}"
    if not is_file(path):
        problem = Problem(f"{setting} (no such file)", NEED, nearest_file(path, "*.toml"))
        raise PlanError(problem if name else Problem(setting, NEED, f"{RULES_WORD}=rules.toml"))


def _read(name: str) -> Mapping[str, str]:
    check_rules_path(name)
    path, setting = Path(name), f"{RULES_WORD} = {name}"
    try:
        text = read_bounded(path).decode()
    except DecodeError as error:
        raise PlanError(Problem(f"{setting} has {error}", NEED)) from None
    except OSError as error:
        raise PlanError(Problem(f"{setting} ({os_error_text(error)})", NEED)) from None
    except UnicodeDecodeError:
        raise PlanError(Problem(f"{setting} is not a text file", "TOML in UTF-8")) from None
    return read_rules(text, where=name)
