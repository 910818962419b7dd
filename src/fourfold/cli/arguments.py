"""Arguments: the words of a command line, sorted, and their values parsed.

word   a task, a plan (….toml or recipe:NAME), or KEY=VALUE
key    a field of the plan, a setting of the run, or a keyword argument of the task's function
Law: an unknown key or an invalid value is an error that names the closest valid one; nothing is ignored.
"""

import dataclasses
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.cli.strategy import STRATEGY_WORDS, expand_strategy
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan_fields import BOOL_WORDS, FIELD_RULES, FIELDS, parse_value
from fourfold.plan.recipes import RECIPE_PREFIX
from fourfold.trainer.callbacks.registry import SHIPPED
from fourfold.trainer.settings import LR_PREFIX, LR_SETTINGS, Setting, Settings, declared_settings, setting
from fourfold.words.errors import Problem, SettingError, closest_match, place_of_setting

CALLBACK_WORD = "callback"
PLAN_WORD = "plan"
RULES_WORD = "tensor"
PROGRAM_WORD = "program"
MAX_PROGRAM_BYTES = 2**24
KEY_VALUE = re.compile(r"(?P<key>[\w.-]+)=(?P<value>.*)", re.DOTALL)
TYPE_TEXTS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "numbers with commas between them",
}


@dataclass(frozen=True)
class ValueType:
    """The valid values: their type (None: any), whether `none` is one, bounds, choices."""

    type: type | None
    is_optional: bool = False
    min_value: float | None = None
    greater_than: float | None = None
    max_value: int | None = None
    choices: tuple[str, ...] = ()

    def requirement(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        need = TYPE_TEXTS.get(self.type, "a value") if self.type else "a value"
        need += f" of at least {self.min_value:g}" if self.min_value is not None else ""
        need += f" above {self.greater_than:g}" if self.greater_than is not None else ""
        need += f" and at most {self.max_value}" if self.max_value is not None else ""
        return need + (", or none" if self.is_optional else "")

    def parse(self, text: str) -> Any:
        """The value in a text. Raises ValueError if it is not valid."""
        if text.lower() == "none" and (self.is_optional or self.type is None):
            return None
        return self._check(PARSERS[self.type](text))

    def convert(self, value: object) -> Any:
        """The value that a TOML file has. Raises ValueError if it is not valid: the text "3" is no number."""
        if isinstance(value, str) and value.lower() == "none" and (self.is_optional or self.type is None):
            return None
        if self.type is float and type(value) is int:
            value = float(value)
        if self.type is int and type(value) is float and value.is_integer():  # 1e4
            value = int(value)
        if self.type is tuple and isinstance(value, list) and all(type(each) in (int, float) for each in value):
            value = tuple(map(float, value))
        if type(value) is not self.type and not (self.type is None and type(value) in (bool, int, float, str)):
            raise ValueError(value)
        return self._check(value)

    def _check(self, value: Any) -> Any:
        """The value, if it is one of the choices and inside the bounds; else raises ValueError."""
        if self.choices and value not in self.choices:
            raise ValueError(value)
        if (self.min_value is not None and value < self.min_value) or (
            self.greater_than is not None and not value > self.greater_than
        ):
            raise ValueError(value)
        if self.max_value is not None and value > self.max_value:
            raise ValueError(value)
        return value


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings of the launch, which `train` does not take; see `launcher.restart_policy.SupervisionPolicy`."""

    fresh: bool = setting(False, type=bool, help="start over; the earlier run is kept as NAME-before-1")
    restarts: int = setting(3, type=int, minimum=0, help="restarts in a row without progress before the job gives up")
    hang_seconds: float | None = setting(
        10.0,
        type=float,
        is_optional=True,
        above=0,
        help="kill a rank that finishes no step for this many seconds and for 5 median steps; none: never",
    )


@dataclass(frozen=True, kw_only=True)
class CallbackSettings:
    """Words for callbacks, which are objects where `train` takes them."""

    callback: str | None = setting(
        None,
        type=str,
        is_optional=True,
        help=f"called during the run: {', '.join(SHIPPED)}, or FILE.py:name; separate several with commas",
        default_text="none",
    )


@dataclass(frozen=True, kw_only=True)
class RulesSettings:
    """Words for the rules of the tensor axis, which are a field of the task."""

    tensor: str | None = setting(
        None,
        type=str,
        help="a TOML file of rules that split layers over the tensor axis",
        default_text="the task's",
    )


LAUNCH_SETTINGS = declared_settings(LaunchSettings)


def command_line_settings(*settings_classes: Any) -> dict[str, Setting]:
    """Every setting of the command line, under its name there, with its default as text."""
    prefixes = {**dict.fromkeys(settings_classes, ""), LRSchedule: LR_PREFIX}
    words = {}
    for declaring, prefix in prefixes.items():
        declared = LR_SETTINGS if declaring is LRSchedule else declared_settings(declaring)
        defaults = {each.name: _format_default(each.default) for each in dataclasses.fields(declaring)}
        for name, each in declared.items():
            if each.word is not None:
                default = each.default_text or defaults[name]
                words[prefix + name] = dataclasses.replace(each, **{**each.word, "default_text": default})
    return words


def _format_default(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_type(declared: Setting) -> ValueType:
    """The valid values of a setting on the command line."""
    return ValueType(
        str if declared.type is os.PathLike else declared.type,
        is_optional=declared.is_optional,
        min_value=declared.minimum,
        greater_than=declared.above,
        max_value=declared.maximum,
        choices=declared.choices,
    )


SETTINGS = command_line_settings(Settings, RulesSettings, CallbackSettings, LaunchSettings)
RUN_SETTINGS = {name: value_type(each) for name, each in SETTINGS.items()}


def _parse_int(text: str) -> int:
    value = float(text)  # accepts 1e4
    if not value.is_integer():
        raise ValueError(text)
    return int(text) if "e" not in text.lower() and "." not in text else int(value)


def _parse_bool(text: str) -> bool:
    if text.lower() not in BOOL_WORDS:
        raise ValueError(text)
    return BOOL_WORDS[text.lower()]


def _parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _parse_any(text: str) -> Any:
    for reader in (_parse_int, float):
        try:
            return reader(text)
        except (ValueError, OverflowError):
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


PARSERS: dict[Any, Callable[[str], Any]] = {
    int: _parse_int,
    float: float,
    bool: _parse_bool,
    str: str,
    tuple: _parse_numbers,
    None: _parse_any,
}


@dataclass(frozen=True)
class ParsedArgs:
    """The words of a command line, sorted; None where there is no such word."""

    task: str | None = None
    plan_file: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedValues:
    """The values, by what they belong to; `callback_options` are still texts, by NAME.OPTION."""

    plan: dict[str, object] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    callback_options: dict[str, str] = field(default_factory=dict)


def parse_args(words: Iterable[str]) -> ParsedArgs:
    """Sort the words. Raises SettingError if there are two tasks, two plans, or a key twice."""
    tasks: list[str] = []
    plans: list[str] = []
    values: dict[str, str] = {}
    problems = []
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if not match:
            (plans if word.endswith(".toml") or word.startswith(RECIPE_PREFIX) else tasks).append(word)
            continue
        if match["key"] == CALLBACK_WORD and CALLBACK_WORD in values:
            values[CALLBACK_WORD] += f",{match['value']}"
            continue
        if match["key"] in values:
            problems.append(Problem(f"{match['key']} = {values[match['key']]} and {word}", "each key once"))
        values[match["key"]] = match["value"]
    if len(tasks) > 1:
        problems.append(Problem(" and ".join(tasks), "one task", "settings as key=value"))
    if len(plans) > 1:
        problems.append(Problem(" and ".join(plans), "one plan"))
    values, wrong_strategy = expand_strategy(values)
    problems += wrong_strategy
    if problems:
        raise SettingError(problems, where="the command line")
    return ParsedArgs(task=tasks[0] if tasks else None, plan_file=plans[0] if plans else None, values=values)


def parse_values(values: Mapping[str, str], arguments: Mapping[str, ValueType] | None) -> ParsedValues:
    """The value of every key. `arguments`: those of the task; None if the task is unknown, then unknown keys pass.

    The fields of the plan are parsed here and checked by the plan. Raises SettingError with all problems.
    """
    parsed, task_types = ParsedValues(), arguments or {}
    problems = []
    for key, text in values.items():
        if key in FIELDS:
            try:
                parsed.plan[key] = _read_program(text) if key == PROGRAM_WORD else parse_value(key, text)
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
                problems.append(Problem(f"{key} = {text}: {reason}", "a file with a line of actions for each pp index"))
            continue
        if key.partition(".")[0] in SHIPPED and "." in key:
            parsed.callback_options[key] = text
            continue
        key_type = task_types.get(key) or RUN_SETTINGS.get(key)
        if key_type is None:
            problems += [] if arguments is None else [_unknown_key(key, text, arguments)]
            continue
        try:
            value = key_type.parse(text)
        except (ValueError, OverflowError):
            problems.append(Problem(f"{key} = {text or '(nothing)'}", key_type.requirement()))
            continue
        # If the task's function takes `steps` itself, the run gets it from the Task.
        (parsed.task if key in task_types else parsed.run)[key] = value
    if problems:
        raise SettingError(problems, where="the command line")
    return parsed


def has_several_values(key: str, text: str, arguments: Mapping[str, ValueType]) -> bool:
    """Whether the commas of `key=a,b` stand between values of the key, and not within one: a text or a tuple."""
    if "," not in text:
        return False
    if key in FIELDS:
        return not FIELD_RULES[key].is_text
    key_type = arguments.get(key) or RUN_SETTINGS.get(key)
    return key_type is not None and (key_type.type in (bool, int, float) or bool(key_type.choices))


def _read_program(path: str) -> str:
    """The text of a written program."""
    with Path(path).open("rb") as file:
        return file.read(MAX_PROGRAM_BYTES).decode()


def _unknown_key(key: str, text: str, arguments: Mapping[str, ValueType]) -> Problem:
    known = [*arguments, *RUN_SETTINGS, *FIELDS, *STRATEGY_WORDS]
    if (place := place_of_setting(key, known)) is not None:
        return Problem(f"{key} = {text}", "a known setting", place)
    close = closest_match(key, known)
    every = [*(f"{name}=…" for name in dict.fromkeys([*arguments, *RUN_SETTINGS])), "or a field of the plan"]
    return Problem(f"{key} = {text}", "a known setting", f"{close}={text}" if close else ", ".join(every))


def argument_types(function: Callable[..., Any]) -> dict[str, ValueType]:
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
            types_by_name[name] = _argument_type(parameter.default, hints.get(name))
    if problems:
        raise SettingError(problems, where=f"the function {getattr(function, '__name__', 'task')}")
    return types_by_name


def _argument_type(default: object, hint: Any) -> ValueType:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    optional = default is None or type(None) in members
    for kind in (type(default), *members):
        if kind in TYPE_TEXTS:
            # `lr: float = 1` is a float.
            return ValueType(float if kind is int and float in members else kind, is_optional=optional)
    return ValueType(None, is_optional=optional)
