"""Plan arguments: the words of `fourfold plan`, sorted.

own word  a word that no other command has: devices=, memory=, cluster=, …; the others are as for `fourfold train`
list      several values with commas, of an own word, a field or an argument of the task: what if
Law: an unknown word or a wrong value is an error that names the closest one, before anything is measured or written.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.cli.arguments import PLAN_WORD
from fourfold.plan.recipes import ASK_PREFIX, RECIPE_PREFIX
from fourfold.words.errors import Problem, SettingError
from fourfold.words.field import KEY_VALUE, Field, read_words
from fourfold.words.units import Dimension

WHERE = "fourfold plan"
GPT = "gpt"
BATCH = "batch_size"
BATCH_SIZE = Field(type=int, minimum=1, maximum=2**20)
CALIBRATE = "calibrate"
DEFAULT_OUT, NO_FILE = "plan.toml", "none"


OWN_WORDS = {
    "devices": Field(type=int, minimum=1),
    "memory": Field(dimension=Dimension.BYTES),
    "network": Field(dimension=Dimension.BYTES_PER_SECOND),
    "cluster": Field(type=str),
    "html": Field(type=os.PathLike),
    "out": Field(type=os.PathLike),
    "overwrite": Field(type=bool),
    "force": Field(type=bool),
    "search_seconds": Field(type=float, above=0, is_optional=True),
    "confirm": Field(type=int, minimum=1, maximum=8),
}
LIST_WORDS = ("devices", "memory", "network")
"""The words that may have several values."""


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
        out = self.own.get("out", DEFAULT_OUT)
        return None if out == NO_FILE else Path(out)


def parse_plan_words(words: Sequence[str]) -> PlanArguments:
    """Sort the words. Raises SettingError with all problems of the own words."""
    asks = [word for word in words if word.startswith(ASK_PREFIX)]
    mine = [match for word in words if (match := KEY_VALUE.fullmatch(word)) and match["key"] in OWN_WORDS]
    _, own, problems = read_words([match[0] for match in mine], OWN_WORDS, lists=LIST_WORDS)
    if len(asks) > 1:
        problems.append(Problem(" and ".join(asks), "one ask"))
    if problems:
        raise SettingError(problems, where=WHERE)
    taken = {*asks, *(match[0] for match in mine)}
    texts = {match["key"]: match["value"] for match in mine}
    return PlanArguments(asks[0] if asks else None, own, texts, tuple(word for word in words if word not in taken))


# ---- `plan=auto` of a training ---------------------------------------------------------------------------------------


AUTO = "auto"
PLAN_AUTO = f"{PLAN_WORD}={AUTO}"


def wants_plan(words: Sequence[str]) -> bool:
    """Whether the words ask for a plan. Raises SettingError for another value than auto."""
    texts = [word.partition("=")[2] for word in words if word.startswith(f"{PLAN_WORD}=")]
    for text in texts:
        if text != AUTO:
            need = f"{AUTO}; a plan's file is a word of its own"
            attempt = text if text.endswith(".toml") else PLAN_AUTO
            raise SettingError(Problem(f"{PLAN_WORD} = {text or '(nothing)'}", need, attempt), where="the command line")
    return bool(texts)


def training_words(words: Sequence[str]) -> list[str]:
    """The words of a training without those that only the planner reads."""
    if not wants_plan(words):
        return list(words)
    from fourfold.cli.run import is_ask

    return [word for word in words if word.partition("=")[2] != AUTO and not is_ask(word)]
