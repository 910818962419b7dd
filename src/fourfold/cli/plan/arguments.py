"""Plan arguments: the words of `fourfold plan`, sorted.

own word  a word that no other command has: devices=, memory=, cluster=, …; the others are as for `fourfold train`
list      several values with commas, of an own word, a field or an argument of the task: what if
Law: an unknown word or a wrong value is an error that names the closest one, before anything is measured or written.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.cli.arguments import KEY_VALUE
from fourfold.plan.ask import ASK_PREFIX
from fourfold.plan.recipes import RECIPE_PREFIX
from fourfold.words.errors import Problem, SettingError
from fourfold.words.units import Dimension, read_quantity

WHERE = "fourfold plan"
GPT = "gpt"
BATCH = "batch_size"
MAX_BATCH = 2**20  # samples in a step
CALIBRATE = "calibrate"
DEFAULT_OUT, NO_FILE = "plan.toml", "none"
MAX_CONFIRMED = 8


def _quantity(name: str, dimension: Dimension) -> Callable[[str], float]:
    """Reads a number with its unit. The function raises SettingError with what is wrong."""

    def read(text: str) -> float:
        value = read_quantity(name, text, dimension)
        if isinstance(value, Problem):
            raise SettingError(value)
        return value

    return read


def _parse_count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def read_size(text: str, largest: int) -> int | None:
    """The whole number from 1 to `largest` in a text; None: there is none."""
    is_number = text.isdecimal() and len(text) <= len(str(largest))
    return int(text) if is_number and 1 <= int(text) <= largest else None


def size_need(largest: int) -> str:
    """What `read_size` reads."""
    return f"a whole number of at least 1 and at most {largest:,}"


def _parse_confirm(text: str) -> int:
    value = _parse_count(text)
    if value > MAX_CONFIRMED:
        raise ValueError(text)
    return value


def _parse_seconds(text: str) -> float:
    value = math.inf if text == NO_FILE else float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def _parse_bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


# Word -> how its text is read, what is needed, and whether it may be a list.
OWN_WORDS: dict[str, tuple[Callable[[str], Any], str, bool]] = {
    "devices": (_parse_count, "a whole number of at least 1", True),
    "memory": (_quantity("memory", Dimension.BYTES), "the bytes of a device", True),
    "network": (_quantity("network", Dimension.BYTES_PER_SECOND), "what a rank sends to other hosts", True),
    "cluster": (str, "a cluster that comes with Fourfold, or a TOML file", False),
    "html": (Path, "a file for the page", False),
    "out": (Path, "a file for the plan, or none", False),
    "overwrite": (_parse_bool, "true or false", False),
    "force": (_parse_bool, "true or false", False),
    "search_seconds": (_parse_seconds, "seconds, or none for as long as it takes", False),
    "confirm": (_parse_confirm, f"how many plans to run here, from 1 to {MAX_CONFIRMED}", False),
}


@dataclass(frozen=True)
class PlanArguments:
    """The words of a command.

    ask     the ask's file or ask:NAME, if one is given
    own     the values of own words; those of a list in order, even if there is one
    texts   the own words as typed
    others  all other words
    kept    of a run that is planned again: the fields of its plan that stay; None: not a run
    """

    ask: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    kept: Mapping[str, object] | None = None

    def value(self, name: str, default: Any = None) -> Any:
        """The value of an own word; the first one of a list."""
        values = self.own.get(name, default)
        return values[0] if isinstance(values, list) else values

    @property
    def name(self) -> str | None:
        """The task, gpt or a run, if one is named."""
        names = (word for word in self.others if "=" not in word and not word.endswith(".toml"))
        return next((word for word in names if not word.startswith(RECIPE_PREFIX)), None)

    def with_changes(self, changes: Mapping[str, str]) -> "PlanArguments":
        """The same with other values of these words. Raises SettingError."""
        texts = [word for word in self.others if word.partition("=")[0] not in changes]
        changed = parse_plan_words([f"{key}={text}" for key, text in changes.items()])
        return dataclasses.replace(
            self,
            own={**self.own, **changed.own},
            texts={**self.texts, **changed.texts},
            others=(*texts, *changed.others),
        )

    @property
    def out(self) -> Path | None:
        """Where the plan goes; None: nowhere."""
        out = self.own.get("out", Path(DEFAULT_OUT))
        return None if str(out) == NO_FILE else out


def parse_plan_words(words: Sequence[str]) -> PlanArguments:
    """Sort the words. Raises SettingError with all problems of the own words."""
    problems: list[Problem] = []
    own, given = dict[str, Any](), dict[str, str]()
    others, asks = [], []
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if match is None and word.startswith(ASK_PREFIX):
            asks.append(word)
        elif match is None or match["key"] not in OWN_WORDS:
            others.append(word)
        elif match["key"] in own:
            problems.append(Problem(f"{match['key']}, twice", "each word once"))
        else:
            given[match["key"]] = match["value"]
            problems += _parse_own(match["key"], match["value"], own)
    if len(asks) > 1:
        problems.append(Problem(" and ".join(asks), "one ask"))
    if problems:
        raise SettingError(problems, where=WHERE)
    return PlanArguments(asks[0] if asks else None, own, given, tuple(others))


def _parse_own(key: str, text: str, own: dict[str, Any]) -> list[Problem]:
    """Read the value of an own word into `own`; returns what is wrong with it."""
    parse, need, is_list = OWN_WORDS[key]
    texts = text.split(",") if is_list else [text]
    own[key] = None
    need += ", or several with commas" if is_list else ""
    if not all(texts):
        return [Problem(f"{key} = {text or '(nothing)'}", need)]
    try:
        values = [parse(each) for each in texts]
    except SettingError as error:
        return list(error.problems)
    except (ValueError, KeyError, OverflowError):
        return [Problem(f"{key} = {text}", need)]
    if len(set(values)) < len(values):
        return [Problem(f"{key} = {text}", "each value once")]
    own[key] = values if is_list else values[0]
    return []
