"""Settings: the words of a command line, sorted, and their values read.

word   what stands on the command line: a task, a plan (…​.toml), or key=value
keys   fields of the plan, settings of the run, keyword arguments of the task's function; no name is two of them
Law: a key or a value that is not understood is refused with the nearest that is; nothing is ignored.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.plan.plan import FIELDS, read_value
from fourfold.plan.rates import CURVES, SCALES
from fourfold.words.arguments import MOST_SEED
from fourfold.words.errors import Problem, SettingError, nearest

DEFAULT_TASK = "lm"
KEY_VALUE = re.compile(r"(?P<key>[\w.-]+)=(?P<value>.*)", re.DOTALL)
TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NEEDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "numbers with commas between them",
}


@dataclass(frozen=True)
class Kind:
    """What a value may be: a type (None: any), whether `none` is one, its bounds, the choices."""

    type: type | None
    optional: bool = False
    least: float | None = None
    above: float | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()

    def need(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        need = NEEDS.get(self.type, "a value") if self.type else "a value"
        need += f" of at least {self.least:g}" if self.least is not None else ""
        need += f" above {self.above:g}" if self.above is not None else ""
        need += f" and at most {self.most}" if self.most is not None else ""
        return need + (", or none" if self.optional else "")

    def read(self, text: str) -> Any:
        """The value. Raises ValueError where the text is none of this kind."""
        if text.lower() == "none" and (self.optional or self.type is None):
            return None
        value = READERS[self.type](text)
        if self.choices and value not in self.choices:
            raise ValueError(text)
        if (self.least is not None and value < self.least) or (self.above is not None and not value > self.above):
            raise ValueError(text)
        if self.most is not None and value > self.most:
            raise ValueError(text)
        return value


RUN = {
    "steps": Kind(int, least=1),
    "batch_size": Kind(int, least=1),
    "seed": Kind(int, least=0, most=MOST_SEED),
    "clip": Kind(float, optional=True, above=0),
    "evaluate_every": Kind(int, least=1),
    "trace_every": Kind(int, least=0),
    "name": Kind(str),
    "checkpoint_every": Kind(int, least=0),
    "ema": Kind(float, optional=True, above=0),
    "init": Kind(str),
    "skip_nan": Kind(int, least=0),
    "drift_check": Kind(int, least=0),
    "fresh": Kind(bool),
    "lr_schedule": Kind(str, choices=tuple(CURVES)),
    "lr_warmup": Kind(int, least=0),
    "lr_scale": Kind(str, choices=tuple(SCALES)),
    "lr_batch_size": Kind(int, least=1),
    "lr_milestones": Kind(tuple),
    "lr_drop": Kind(float, above=0),
    "lr_floor": Kind(float, least=0),
    "restarts": Kind(int, least=0),
    "hang_seconds": Kind(float, optional=True, above=0),
}
RATES = "lr_"  # what the settings of the learning rate begin with; the rest is a field of `Rates`


def _read_int(text: str) -> int:
    value = float(text)  # so that 1e4 is a whole number too
    if not value.is_integer():
        raise ValueError(text)
    return int(text) if "e" not in text.lower() and "." not in text else int(value)


def _read_bool(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise ValueError(text)
    return TRUTHS[text.lower()]


def _read_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _read_any(text: str) -> Any:
    for reader in (_read_int, float):
        try:
            return reader(text)
        except (ValueError, OverflowError):
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


READERS: dict[Any, Callable[[str], Any]] = {
    int: _read_int,
    float: float,
    bool: _read_bool,
    str: str,
    tuple: _read_numbers,
    None: _read_any,
}


@dataclass(frozen=True)
class Words:
    """A command line, sorted."""

    task: str = DEFAULT_TASK
    plan: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    """The values read, by what they are for."""

    plan: dict[str, object] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)


def sort(words: Iterable[str]) -> Words:
    """Which word is what. Raises SettingError where there are two tasks, two plans, or a key twice."""
    tasks: list[str] = []
    plans: list[str] = []
    values: dict[str, str] = {}
    problems = []
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if not match:
            (plans if word.endswith(".toml") else tasks).append(word)
            continue
        if match["key"] in values:
            problems.append(Problem(f"{match['key']} = {values[match['key']]} and {word}", "each key once"))
        values[match["key"]] = match["value"]
    if len(tasks) > 1:
        problems.append(Problem(" and ".join(tasks), "one task", "settings as key=value"))
    if len(plans) > 1:
        problems.append(Problem(" and ".join(plans), "one plan"))
    if problems:
        raise SettingError(problems, where="the command line")
    return Words(task=tasks[0] if tasks else DEFAULT_TASK, plan=plans[0] if plans else None, values=values)


def read(values: Mapping[str, str], arguments: Mapping[str, Kind] | None) -> Values:
    """Every key's value. `arguments`: the task's, or None where the task is not known (then its keys are not judged).

    Plan fields are read but not judged; that is the plan's own. Raises SettingError with all problems.
    """
    found, own = Values(), arguments or {}
    problems = []
    for key, text in values.items():
        if key in FIELDS:
            found.plan[key] = read_value(key, text)
            continue
        kind = own.get(key) or RUN.get(key)
        if kind is None:
            problems += [] if arguments is None else [_unknown(key, text, arguments)]
            continue
        try:
            value = kind.read(text)
        except (ValueError, OverflowError):
            problems.append(Problem(f"{key} = {text or '(nothing)'}", kind.need()))
            continue
        # A task's function that takes `steps` itself tells the run through its Task.
        (found.task if key in own else found.run)[key] = value
    if problems:
        raise SettingError(problems, where="the command line")
    return found


def _unknown(key: str, text: str, arguments: Mapping[str, Kind]) -> Problem:
    close = nearest(key, [*arguments, *RUN, *FIELDS])
    every = [*(f"{name}=…" for name in dict.fromkeys([*arguments, *RUN])), "or a field of the plan"]
    return Problem(f"{key} = {text}", "a known setting", f"{close}={text}" if close else ", ".join(every))


def kinds(function: Callable[..., Any]) -> dict[str, Kind]:
    """What a task's function takes: its keyword arguments with defaults.

    Raises SettingError where an argument has no default, or the name of a plan's field.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # annotations are a help, not a condition
        hints = {}
    found, problems = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is parameter.empty:
            problems.append(Problem(f"the argument {name} has no default", "one for every argument", f"{name}=…"))
        elif name in FIELDS:
            problems.append(Problem(f"the argument {name}", "a name that is no field of the plan", f"my_{name}"))
        else:
            found[name] = _kind(parameter.default, hints.get(name))
    if problems:
        raise SettingError(problems, where=f"the function {getattr(function, '__name__', 'task')}")
    return found


def _kind(default: object, hint: Any) -> Kind:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    optional = default is None or type(None) in members
    for of in (type(default), *members):
        if of in NEEDS:
            # `lr: float = 1` means a float.
            return Kind(float if of is int and float in members else of, optional=optional)
    return Kind(None, optional=optional)
