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

from fourfold.cli.run import Run, resolve
from fourfold.words.errors import SettingError
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

    run     the other words: a task, gpt, or the name of a run; the ask, and fields that are pinned
    own     the values of own words; those of a list in order, even if there is one
    texts   the own words as typed
    kept    of a run that is planned again: the fields of its plan that stay; None: not a run
    """

    run: Run = Run()  # noqa: RUF009 (frozen)
    own: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, object] | None = None

    def value(self, name: str, default: Any = None) -> Any:
        """The value of an own word; the first one of a list."""
        values = self.own.get(name, default)
        return values[0] if isinstance(values, list) else values

    def with_changes(self, changes: Mapping[str, str]) -> "PlanArguments":
        """The same with other values of these words. Raises SettingError."""
        changed = parse_plan_words([f"{key}={text}" for key, text in changes.items()])
        return dataclasses.replace(
            self,
            own={**self.own, **changed.own},
            texts={**self.texts, **changed.texts},
            run=self.run.with_texts(**changed.run.texts),
        )

    @property
    def out(self) -> Path | None:
        """Where the plan goes; None: nowhere."""
        out = self.own.get("out", DEFAULT_OUT)
        return None if out == NO_FILE else Path(out)


def parse_plan_words(words: Sequence[str]) -> PlanArguments:
    """Sort the words. Raises SettingError with all problems of the own words."""
    mine = [match for word in words if (match := KEY_VALUE.fullmatch(word)) and match["key"] in OWN_WORDS]
    _, own, problems = read_words([match[0] for match in mine], OWN_WORDS, lists=LIST_WORDS)
    run, taken = Run(), {match[0] for match in mine}
    try:
        run = resolve((word for word in words if word not in taken), takes_ask=True)
    except SettingError as error:
        problems += error.problems
    if problems:
        raise SettingError(problems, where=WHERE)
    return PlanArguments(run, own, {match["key"]: match["value"] for match in mine})
