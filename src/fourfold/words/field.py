"""Field: a value that a user gives by name: its type, its bounds, its meaning.

A field of the plan, a setting of the run, an argument of a task, an option of a callback, a word of `fourfold plan` or
`fourfold feed`, a number of a cluster: each is declared once, and command lines, files, Python, help and docs follow.

text   the value as a word of a command line has it
Law: what is needed is said in the same words wherever a value is given.
"""

import contextlib
import dataclasses
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from fourfold.words.argument_checks import format_argument, is_int, is_real
from fourfold.words.errors import Problem, SettingError, closest_match
from fourfold.words.units import Dimension, read_quantity


class Kind(NamedTuple):
    """The values of a type: how errors name one, which they are, and how each is read."""

    need: str
    holds: Callable[[Any], bool]
    parse: Callable[[str], Any] = str
    """The value in a text. Raises ValueError."""
    convert: Callable[[Any], Any] = lambda value: value
    """What a TOML file has, as a value; or what it has, if it is none."""
    has_commas: bool = True
    """Whether a comma may be part of one value."""


def _parse_int(text: str) -> int:
    value = float(text)  # accepts 1e4
    if not value.is_integer():
        raise ValueError(text)
    return int(text) if "e" not in text.lower() and "." not in text else int(value)


BOOL_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _parse_bool(text: str) -> bool:
    if text.lower() not in BOOL_WORDS:
        raise ValueError(text)
    return BOOL_WORDS[text.lower()]


def _parse_any(text: str) -> Any:
    for reader in (_parse_int, float):
        with contextlib.suppress(ValueError, OverflowError):
            return reader(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _to_numbers(value: Any) -> Any:
    is_list = isinstance(value, list) and all(type(each) in (int, float) for each in value)
    return tuple(map(float, value)) if is_list else value


SCALARS = (bool, int, float, str)
KINDS: dict[Any, Kind] = {
    int: Kind(
        "a whole number",
        is_int,
        _parse_int,
        lambda value: int(value) if type(value) is float and value.is_integer() else value,  # 1e4
        has_commas=False,
    ),
    float: Kind(
        "a number", is_real, float, lambda value: float(value) if type(value) is int else value, has_commas=False
    ),
    bool: Kind("true or false", lambda value: isinstance(value, bool), _parse_bool, has_commas=False),
    str: Kind("a text", lambda value: isinstance(value, str)),
    tuple: Kind(
        "numbers with commas between them",
        lambda value: type(value) is tuple and all(map(is_real, value)),
        lambda text: tuple(map(float, text.split(","))),
        _to_numbers,
    ),
    os.PathLike: Kind("a path", lambda value: isinstance(value, str | os.PathLike)),
    Mapping: Kind("a dict", lambda value: isinstance(value, Mapping)),
    None: Kind("a value", lambda value: type(value) in SCALARS, _parse_any),
}
"""By a field's type. Of another class every instance is a value, and no text."""
WORD_TYPES = (*SCALARS, tuple)
"""What a word of a command line can be."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """What a named value may be, and what it means.

    type         int, float, str, bool, tuple (of numbers), os.PathLike, Mapping, a class; None: any scalar
    is_optional  None is legal too, which is `none` in files and words
    minimum, maximum  the least and the greatest value; `above`, `below`: bounds that are not legal themselves
    choices      the legal values; `supported`: those that this version can build, where they are not all
    dimension    of a number that has a unit, such as "80 GiB"
    check        (value, name) -> problems, in place of the type and the bounds where they do not say it all
    attempt      what an error suggests
    default      what it is if it is not given; dataclasses.MISSING: it must be given
    default_text the default as tables show it; "": the default itself
    """

    type: Any = None
    help: str = ""
    is_optional: bool = False
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    supported: tuple[Any, ...] | None = None
    dimension: Dimension | None = None
    check: Callable[[Any, str], list[Problem]] | None = None
    attempt: str = ""
    # By a factory: a dataclass takes MISSING itself for "no default".
    default: Any = dataclasses.field(default_factory=lambda: dataclasses.MISSING)
    default_text: str = ""

    @property
    def kind(self) -> Kind:
        """The row of KINDS."""
        return KINDS.get(self.type) or Kind(f"a {self.type.__name__}", lambda value: isinstance(value, self.type))

    def requirement(self, none: str = "none") -> str:
        """What an error says is needed. `none`: how None is written where the value is given."""
        return self._need() + (f", or {none}" if self.is_optional else "")

    def _need(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        need = self.kind.need
        if self.type is int and self.minimum is not None and self.maximum is not None:
            return f"{need} from {self.minimum} to {self.maximum}"
        lower = f" of at least {self.minimum:g}" if self.minimum is not None else ""
        lower = f" above {self.above:g}" if self.above is not None else lower
        upper = f", at most {self.maximum:g}" if self.maximum is not None else ""
        upper = f", below {self.below:g}" if self.below is not None else upper
        return need + lower + upper

    def accepts(self, value: object) -> bool:
        """Whether a value given in Python or read from a file is legal, in this version or a later one."""
        if value is None:
            return self.is_optional
        # Most values have the very type: planning makes many thousands of plans.
        has_type = (type(value) is self.type and self.type in (int, str, bool)) or self.kind.holds(value)
        return has_type and self._is_within(value)

    def _is_within(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def problems(self, name: str, value: Any, *, none: str = "None") -> list[Problem]:
        """The problem with a value, if there is one. `none`: how None is written where the value is given."""
        if value is None and self.is_optional:
            return []
        if self.check is not None:
            return self.check(value, name)
        if not self.accepts(value):
            texts = [each for each in self.supported or self.choices if isinstance(each, str)]
            close = closest_match(value, texts) if isinstance(value, str) else None
            attempt = self.attempt or (f"{name} = {close}" if close else "")
            return [Problem(format_argument(name, value), self.requirement(none), attempt)]
        if self.supported is not None and value not in self.supported:
            built = " or ".join(map(str, self.supported))
            need = f"{built} (other values are not implemented yet)"
            return [Problem(f"{name} = {value}", need, f"{name} = {built}")]
        return []

    def parse(self, text: str) -> Any:
        """The value in a text. Raises ValueError if it is not legal."""
        if text.lower() == "none" and (self.is_optional or self.type is None):
            return None
        value = self.kind.parse(text)
        if not self._is_within(value):
            raise ValueError(text)
        return value

    def convert(self, value: object) -> Any:
        """The value that a TOML file has. Raises ValueError if it is not legal: the text "3" is no number."""
        if isinstance(value, str) and value.lower() == "none" and (self.is_optional or self.type is None):
            return None
        value = self.kind.convert(value)
        if value is None or not self.accepts(value):
            raise ValueError(value)
        return value

    def read(self, name: str, text: str, *, where: str = "") -> Any:
        """The value of `name=text` on a command line. Raises SettingError if it is not legal."""
        if self.dimension is not None:
            value = read_quantity(name, text, self.dimension, allows_zero=self.minimum == 0)
            if isinstance(value, Problem):
                raise SettingError(value._replace(attempt=value.attempt.replace(" = ", "=", 1)), where=where)
            return value
        try:
            value = self.parse(text)
        except (ValueError, OverflowError):
            shown = text if len(text) <= 60 else f"{text[:60]}…"
            problem = Problem(f"{name} = {shown or '(nothing)'}", self.requirement(), self.attempt)
            raise SettingError(problem, where=where) from None
        if self.check is not None and (problems := self.problems(name, value)):
            raise SettingError(problems, where=where)
        return value

    def read_list(self, name: str, text: str, *, where: str = "") -> list[Any]:
        """The values of `name=text,text`. Raises SettingError if one is not legal, or is there twice."""
        texts = text.split(",")
        if not all(texts):
            got, need = f"{name} = {text or '(nothing)'}", f"{self.requirement()}, or several with commas"
            raise SettingError(Problem(got, need), where=where)
        values = [self.read(name, each, where=where) for each in texts]
        if len(set(values)) < len(values):
            raise SettingError(Problem(f"{name} = {text}", "each value once"), where=where)
        return values

    @property
    def offered(self) -> tuple[str, ...]:
        """The values, where they are few."""
        return ("true", "false") if self.type is bool else tuple(map(str, self.supported or self.choices))

    @property
    def has_commas(self) -> bool:
        """Whether a comma may be part of one value: of a text, or of numbers."""
        return not self.choices and self.kind.has_commas


@dataclass(frozen=True, kw_only=True)
class Setting(Field):
    """A field that is a setting of a run.

    in_identity  whether runs that differ in it are different runs; "if given": unless it is the default
    word         fields that differ on the command line; None: no word of the command line
    """

    in_identity: Literal["never", "always", "if given"] = "never"
    word: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)


# ---- words -----------------------------------------------------------------------------------------------------------

KEY_VALUE = re.compile(r"(?P<key>[\w.-]+)=(?P<value>.*)", re.DOTALL)


def read_words(
    words: Iterable[str], fields: Mapping[str, Field], *, lists: Collection[str] = ()
) -> tuple[list[str], dict[str, Any], list[Problem]]:
    """The words of a command that are not KEY=VALUE, the values of those that are, and what is wrong with them.

    lists  the keys that may have several values, with commas: theirs are lists
    """
    others, values, problems = list[str](), dict[str, Any](), list[Problem]()
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if match is None:
            others.append(word)
            continue
        key, text = match["key"], match["value"]
        if key not in fields:
            close = closest_match(key, fields)
            attempt = f"{close}={text}" if close else f"one of {', '.join(fields)}"
            problems.append(Problem(word, "a known word", attempt))
        elif key in values:
            problems.append(Problem(f"{key}, twice", "each word once"))
        else:
            values[key] = None
            try:
                values[key] = fields[key].read_list(key, text) if key in lists else _read_word(fields[key], key, text)
            except SettingError as error:
                problems += error.problems
    return others, values, problems


def _read_word(field: Field, key: str, text: str) -> Any:
    if not text:
        raise SettingError(Problem(f"{key} = (nothing)", field.requirement(), field.attempt))
    return field.read(key, text)


# ---- values ----------------------------------------------------------------------------------------------------------


def value_text(value: object) -> str:
    """A value as a text: what `parse` reads."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def to_builtin(value: object) -> object:
    """A value as a builtin type: NumPy's numbers and strings, and paths, are converted."""
    if type(value) in SCALARS or value is None:
        return value  # most values; asking an abstract class takes a microsecond
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str.__str__(value) if isinstance(value, str) else value


# ---- declarations ----------------------------------------------------------------------------------------------------


def declare(default: Any = dataclasses.MISSING, /, **declared: Any) -> Any:
    """A dataclass field that users give; `declared` are those of `Field`. Without a default it must be given.

    Its type is that of the annotation: `int | None` is optional.
    """
    return dataclasses.field(default=default, metadata=declared)


AnyField = TypeVar("AnyField", bound=Field)


def declared_fields(declaring: Any, kind: type[AnyField]) -> dict[str, AnyField]:
    """What a dataclass, or the class of an instance, declares, by name."""
    return {each.name: _declared(each, kind) for each in dataclasses.fields(declaring)}


def declared_settings(declaring: Any) -> dict[str, Setting]:
    """The settings among them."""
    return declared_fields(declaring, Setting)


def declared_problems(instance: Any) -> list[Problem]:
    """Everything that is declared and has an illegal value."""
    fields = declared_settings(instance).items()
    return [problem for name, each in fields for problem in each.problems(name, getattr(instance, name))]


def _declared(each: Any, kind: type[AnyField]) -> AnyField:
    members = hint_members(each.type)
    declared_type = next(member for member in members if member is not type(None))
    of_annotation = {"type": declared_type, "is_optional": type(None) in members, "default": each.default}
    return kind(**{**of_annotation, **each.metadata})


def hint_members(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows, without their parameters: float and NoneType of `float | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(member for each in typing.get_args(hint) for member in hint_members(each))
    return (typing.get_origin(hint) or hint,)
