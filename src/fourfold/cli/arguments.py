"""Arguments: what may be given to a run as KEY=VALUE, and the values in words.

key    a field of the plan, a setting of the run, or a keyword argument of the task's function
Law: an unknown key or an invalid value is an error that names the closest valid one; nothing is ignored.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.cli.strategy import STRATEGY_WORDS
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan_fields import FIELDS, PLAN_FIELDS, parse_value
from fourfold.trainer.callbacks.registry import SHIPPED
from fourfold.trainer.settings import LR_PREFIX, Settings
from fourfold.words.errors import Problem, SettingError, closest_match, place_of_setting
from fourfold.words.field import WORD_TYPES, Field, Setting, declare, declared_settings, hint_members, value_text

CALLBACK_WORD = "callback"
PLAN_WORD = "plan"
RULES_WORD = "tensor"
PROGRAM_WORD = "program"
MAX_PROGRAM_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """Settings that `train` does not take: words for what it takes as objects, and those of the launch.

    For the launch see `launcher.restart_policy.SupervisionPolicy`.
    """

    tensor: str | None = declare(
        None,
        help="a TOML file of rules that split layers over the tensor axis",
        default_text="the task's",
    )
    callback: str | None = declare(
        None,
        help=f"called during the run: {', '.join(SHIPPED)}, or FILE.py:name; separate several with commas",
        default_text="none",
    )
    fresh: bool = declare(False, help="start over; the earlier run is kept as NAME-before-1")
    restarts: int = declare(3, minimum=0, help="restarts in a row without progress before the job gives up")
    hang_seconds: float | None = declare(
        10.0,
        above=0,
        help="kill a rank that finishes no step for this many seconds and for 5 median steps; none: never",
    )


LAUNCH_SETTINGS = ("fresh", "restarts", "hang_seconds")


def command_line_settings(*settings_classes: Any) -> dict[str, Setting]:
    """Every setting of the command line, under its name there, with its default as text."""
    prefixes = {**dict.fromkeys(settings_classes, ""), LRSchedule: LR_PREFIX}
    words = {}
    for declaring, prefix in prefixes.items():
        for name, each in declared_settings(declaring).items():
            if each.word is not None:
                default = each.default_text or _format_default(each.default)
                words[prefix + name] = dataclasses.replace(each, **{**each.word, "default_text": default})
    return words


def _format_default(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else value_text(value)


SETTINGS = command_line_settings(Settings, CommandSettings)


@dataclass(frozen=True)
class ParsedValues:
    """The values, by what they belong to; `callback_options` are still texts, by NAME.OPTION."""

    plan: dict[str, object] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    callback_options: dict[str, str] = field(default_factory=dict)


Arguments = Mapping[str, Field] | None
"""The keyword arguments of the task's function; None if they are unknown."""


def parse_values(values: Mapping[str, str], arguments: Arguments) -> ParsedValues:
    """The value of every key. `arguments`: those of the task; None if they are unknown, then only the plan is read.

    The fields of the plan are parsed here and checked by the plan. Raises SettingError with all problems.
    """
    parsed, problems = ParsedValues(), []
    for key, text in values.items():
        if key in FIELDS:
            try:
                parsed.plan[key] = _read_program(text) if key == PROGRAM_WORD else parse_value(key, text)
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
                problems.append(Problem(f"{key} = {text}: {reason}", "a file with a line of actions for each pp index"))
            continue
        if arguments is None:
            continue
        if key.partition(".")[0] in SHIPPED and "." in key:
            parsed.callback_options[key] = text
            continue
        key_type = arguments.get(key) or SETTINGS.get(key)
        if key_type is None:
            problems.append(_unknown_key(key, text, arguments))
            continue
        try:
            value = key_type.read(key, text)
        except SettingError as error:
            problems += error.problems
            continue
        # If the task's function takes `steps` itself, the run gets it from the Task.
        (parsed.task if key in arguments else parsed.run)[key] = value
    if problems:
        raise SettingError(problems, where="the command line")
    return parsed


def has_several_values(key: str, text: str, arguments: Mapping[str, Field]) -> bool:
    """Whether the commas of `key=a,b` stand between values of the key, and not within one: a text or a tuple."""
    if "," not in text:
        return False
    key_type = PLAN_FIELDS.get(key) or arguments.get(key) or SETTINGS.get(key)
    return key_type is not None and not key_type.has_commas


def several_values(texts: Mapping[str, str], arguments: Mapping[str, Field], *, where: str) -> dict[str, list[str]]:
    """The values, as typed, of each key that has several. Raises SettingError if one is empty, or there twice."""
    found = {key: text.split(",") for key, text in texts.items() if has_several_values(key, text, arguments)}
    problems = [
        Problem(f"{key}={texts[key]}", "a value on both sides of each comma, each of them once")
        for key, values in found.items()
        if "" in values or len(set(values)) < len(values)
    ]
    if problems:
        raise SettingError(problems, where=where)
    return found


def _read_program(path: str) -> str:
    """The text of a written program."""
    with Path(path).open("rb") as file:
        return file.read(MAX_PROGRAM_BYTES).decode()


def _unknown_key(key: str, text: str, arguments: Mapping[str, Field]) -> Problem:
    known = [*arguments, *SETTINGS, *FIELDS, *STRATEGY_WORDS]
    if (place := place_of_setting(key, known)) is not None:
        return Problem(f"{key} = {text}", "a known setting", place)
    close = closest_match(key, known)
    own = "".join(f"{name}=…, " for name in arguments)
    pages = "fourfold train --help for the settings, or fourfold show --help for the fields of a plan"
    return Problem(f"{key} = {text}", "a known setting", f"{close}={text}" if close else f"{own}{pages}")


def argument_types(function: Callable[..., Any]) -> dict[str, Field]:
    """The keyword arguments of a task's function, with the valid values of each.

    Raises SettingError if an argument has no default, or has the name of a field of the plan.
    """
    try:
        hints = typing.get_type_hints(function.func if isinstance(function, functools.partial) else function)
    except Exception:  # annotations that cannot be evaluated are ignored
        hints = {}
    types_by_name, problems = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is parameter.empty:
            problems.append(Problem(f"the argument {name} has no default", "one for every argument", f"{name}=…"))
        elif name in (*FIELDS, PLAN_WORD):
            problems.append(Problem(f"the argument {name}", "a name that is not a field of the plan", f"my_{name}"))
        else:
            types_by_name[name] = argument_type(parameter.default, hint_members(hints.get(name)))
    if problems:
        raise SettingError(problems, where=f"the function {getattr(function, '__name__', 'task')}")
    return types_by_name


def argument_type(default: object, members: Sequence[Any]) -> Field:
    """What an argument may be, by its default and the types that its annotation allows."""
    kind = next((each for each in (type(default), *members) if each in WORD_TYPES), None)
    # `lr: float = 1` is a float.
    kind = float if kind is int and float in members else kind
    return Field(type=kind, is_optional=default is None or type(None) in members)


# ---- tables ----------------------------------------------------------------------------------------------------------


TRAIN_INDENT, SHOW_INDENT = " " * 13, "  "
LINK = re.compile(r"\[([^\[\]]++)\]\([^()]++\)")
SEE = re.compile(r" \(\[[^\[\]]++\]\([^()]++\)\)")  # a link between brackets


def help_table(settings: Mapping[str, Setting] = SETTINGS) -> str:
    """A line for each setting: its name, its meaning, its default."""
    return _lines({name: (each.help, each.default_text) for name, each in settings.items()}, TRAIN_INDENT)


def plan_help_table() -> str:
    """The same of the fields of a plan."""
    return _lines({name: (_plain(each.help), _default(each)) for name, each in PLAN_FIELDS.items()}, SHOW_INDENT)


def _lines(rows: Mapping[str, tuple[str, str]], indent: str) -> str:
    """`rows`: meaning and default, by name."""
    width = max(map(len, rows))
    return "\n".join(f"{indent}{name:<{width}}  {meaning} ({default})" for name, (meaning, default) in rows.items())


def _plain(help_text: str) -> str:
    return LINK.sub(r"\1", SEE.sub("", help_text)).replace("`", "")


def _default(field: Field) -> str:
    return value_text(field.default) or "none"
