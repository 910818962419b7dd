"""Callback lists: the callbacks that a run was given, checked, with a name for each, and what they need.

Law: within a run each callback has a name of its own, the same after every restart.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fourfold.trainer.callbacks.registry import SHIPPED
from fourfold.words.argument_checks import format_argument
from fourfold.words.callback import Callback
from fourfold.words.errors import Problem, SettingError


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
