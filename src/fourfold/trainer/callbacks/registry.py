"""Registry: the callbacks that a settings file or the command line may name, and those that a run was given.

option  a keyword of the callback's constructor that is a text, a number or a truth value
Law: a name never leads to code that is not part of Fourfold. Within a run each callback has a name of its own, the same
after every restart.
"""

import importlib
import inspect
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.words.argument_checks import format_argument
from fourfold.words.callback import Callback
from fourfold.words.errors import Problem, SettingError, closest_match
from fourfold.words.field import SCALARS, Field, hint_members

# ---- by their names --------------------------------------------------------------------------------------------------


SHIPPED = {
    "csv": ("csv_writer", "CSV"),
    "early_stopping": ("early_stopping", "EarlyStopping"),
    "mlflow": ("mlflow", "MLflow"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "trackio": ("trackio", "Trackio"),
    "wandb": ("wandb", "WandB"),
}
"""By name: the module in this package, and the class in it. A module is imported when it is used."""


def shipped_class(name: str) -> type[Callback]:
    """The class of a shipped callback. Raises SettingError for a name that is none."""
    if name not in SHIPPED:
        need = f"{', '.join(SHIPPED)}, or FILE.py:name on the command line"
        raise SettingError(Problem(f"the callback {name}", need, closest_match(name, SHIPPED) or ""), where="callbacks")
    module, kind = SHIPPED[name]
    return getattr(importlib.import_module(f"fourfold.trainer.callbacks.{module}"), kind)


def callback_options(name: str) -> dict[str, Field]:
    """The options of a shipped callback. Raises SettingError for a name that is none."""
    constructor = shipped_class(name).__init__
    hints = typing.get_type_hints(constructor)
    options = {}
    for each in list(inspect.signature(constructor).parameters.values())[1:]:
        members = hint_members(hints[each.name])
        plain = [member for member in members if member in SCALARS]
        if plain:
            options[each.name] = Field(type=plain[0], is_optional=type(None) in members, default=each.default)
    return options


def make_shipped(name: str, texts: Mapping[str, str]) -> Callback:
    """The shipped callback with these options. Raises SettingError for unknown ones, and for values of other types."""
    known, options, problems = callback_options(name), dict[str, Any](), list[Problem]()
    for key, text in texts.items():
        if key not in known:
            need, close = f"an option of {name}: {', '.join(known) or 'it has none'}", closest_match(key, known) or ""
            problems.append(Problem(f"{name}.{key}", need, close and f"{name}.{close}"))
            continue
        try:
            options[key] = known[key].read(f"{name}.{key}", text)
        except SettingError as error:
            problems += error.problems
    if problems:
        raise SettingError(problems, where="callbacks")
    return shipped_class(name)(**options)


# ---- of a run --------------------------------------------------------------------------------------------------------


def check_callbacks(callbacks: Any) -> Sequence[Callback]:
    """The callbacks as they were given. Raises SettingError for anything that is none."""
    if not isinstance(callbacks, list | tuple):
        attempt = "callbacks=[…]" if isinstance(callbacks, Callback) else ""
        problem = Problem(format_argument("callbacks", callbacks), "a list of callbacks", attempt)
        raise SettingError(problem, where="the settings")
    problems = []
    for index, each in enumerate(callbacks):
        if not isinstance(each, Callback):
            problems.append(Problem(format_argument(f"callbacks[{index}]", each), "a Callback", _suggestion(each)))
    if problems:
        raise SettingError(problems, where="the settings")
    return callbacks


def _suggestion(given: Any) -> str:
    """The callback that was meant, as it is made in Python."""
    if isinstance(given, str) and given in SHIPPED:
        return f"ff.callbacks.{SHIPPED[given][1]}()"
    if isinstance(given, type) and issubclass(given, Callback):
        return f"{given.__name__}()"
    return "an object of a class derived from ff.Callback"


def unique_names(callbacks: Sequence[Callback]) -> list[str]:
    """The callbacks' names; the second of a name gets a number."""
    counts: Counter[str] = Counter()
    names = []
    for each in callbacks:
        counts[each.name] += 1
        names.append(each.name if counts[each.name] == 1 else f"{each.name} {counts[each.name]}")
    return names


def required_metrics(callbacks: Sequence[Callback]) -> dict[str, list[str]]:
    """The measures that callbacks need, by the callback's name."""
    named = zip(unique_names(callbacks), callbacks, strict=True)
    return {name: list(each.required_metrics) for name, each in named if each.required_metrics}
