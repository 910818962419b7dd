"""Declared settings: what a field of a dataclass says of itself, from which checks, tables and help are derived.

setting  a field with a `Setting` in its metadata
Law: a setting is declared once; nothing else lists its type, its bounds or its help.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fourfold.words import argument_checks
from fourfold.words.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a setting means, and which values it may have.

    type         int, float, str, bool, tuple (of numbers), os.PathLike, Mapping, or the class of an object
    check        (value, name) -> problems, where the type and the bounds do not say it all
    attempt      what an error suggests
    default_text  the default as tables show it; "": the field's own
    in_identity  "if given": unless it is the default
    word         fields that differ on the command line; None: no word of the command line
    """

    help: str
    type: Any
    is_optional: bool = False
    minimum: int | None = None
    above: float | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any, str], list[Problem]] | None = None
    attempt: str = ""
    default_text: str = ""
    in_identity: Literal["never", "always", "if given"] = "never"
    word: Mapping[str, Any] | None = field(default_factory=dict)

    def problems(self, name: str, value: Any) -> list[Problem]:
        """The problem with a value given in Python, if there is one."""
        if value is None and self.is_optional:
            return []
        if self.check is not None:
            return self.check(value, name)
        optional, attempt = self.is_optional, self.attempt
        checks: dict[Any, Callable[..., list[Problem]]] = {
            int: functools.partial(argument_checks.int_problems, minimum=self.minimum or 0, attempt=attempt),
            float: functools.partial(argument_checks.positive_problems, attempt=attempt),
            str: argument_checks.str_problems,
            os.PathLike: functools.partial(argument_checks.str_problems, path=True),
            Mapping: argument_checks.mapping_problems,
        }
        of_class = functools.partial(argument_checks.instance_problems, kind=self.type, attempt=attempt)
        return checks.get(self.type, of_class)(name, value, optional=optional)


def setting(default: Any = dataclasses.MISSING, /, **declared: Any) -> Any:
    """A dataclass field that is a setting; `declared` are fields of `Setting`. Without a default it must be given."""
    return field(default=default, metadata={"setting": Setting(**declared)})


def declared_settings(settings: Any) -> dict[str, Setting]:
    """The settings that a dataclass declares, or the class of an instance, by name."""
    return {each.name: each.metadata["setting"] for each in dataclasses.fields(settings)}
