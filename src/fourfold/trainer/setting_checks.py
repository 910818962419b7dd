"""Setting checks: what is wrong with the values of settings that have rules of their own.

Law: a check returns every problem of a value, and raises nothing.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from fourfold.plan.order_names import ORDERS
from fourfold.words import argument_checks
from fourfold.words.errors import Problem, closest_match, place_of_setting
from fourfold.words.measures import MODES


def ema_problems(value: Any, name: str) -> list[Problem]:
    """Why a value is no decay of an average."""
    if argument_checks.is_real(value) and 0 < value < 1:
        return []
    return [Problem(f"{name} = {value!r}", "more than 0, less than 1", "ema=0.999")]


def json_problems(value: Any, name: str) -> list[Problem]:
    """What of a dict cannot stand in settings.json."""
    problems = argument_checks.mapping_problems(name, value, optional=True)
    for key, each in value.items() if not problems else ():
        try:
            msgspec.json.encode({key: each})
        except (TypeError, ValueError, OverflowError) as error:
            problems.append(Problem(f"{name}[{key!r}]: {error}", "a value that JSON can hold"))
    return problems


def mode_problems(value: Any, name: str) -> list[Problem]:
    """Why a value is no way to choose the best."""
    return (
        [] if value in MODES else [Problem(argument_checks.format_argument(name, value), "min or max", f"{name}=max")]
    )


def order_problems(value: Any, name: str) -> list[Problem]:
    """Why a value is no order of samples. Whether the data can have it is known when the data is open."""
    if value is None or value in ORDERS:
        return []
    return [Problem(argument_checks.format_argument(name, value), " or ".join(ORDERS), f"{name}=windowed window=4")]


def name_problems(name: str, value: Any, known: Collection[str], lr_words: Collection[str]) -> list[Problem]:
    """Why a keyword of `train` is none. `lr_words`: what the command line calls lr_WORD, and Python `rates`."""
    if name in known:
        return []
    field = name.removeprefix("lr_")
    attempt = place_of_setting(name, known) or closest_match(name, known)
    if field != name and field in lr_words:
        attempt = f"rates=ff.LRSchedule({field}=…)"
    return [Problem(argument_checks.format_argument(name, value), "a keyword of ff.train", attempt or "help(ff.train)")]
