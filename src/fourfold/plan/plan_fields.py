"""Plan fields: what each field of a plan may hold, and every problem of a set of values.

rule       what a field may hold: its type, its choices or its bounds
supported  the choices that this version can build; None = all of them
Law: a value that passes `plan_problems` is legal whatever the model and the machine are.
"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourfold.plan.codec import CODECS
from fourfold.plan.precision import COMPUTE_FORMATS, REDUCE_FORMATS
from fourfold.plan.sequence import RINGS, ulysses_problem
from fourfold.words.errors import Problem, closest_match

MAX_RANKS = 2**20  # ranks or microbatches; beyond any machine, and a plan can still be shown


@dataclass(frozen=True)
class FieldRule:
    """What one field may hold. `built` narrows it to what this version can do; None = all."""

    value_type: type
    choices: tuple[Any, ...] = ()
    minimum: int = 1
    supported: tuple[Any, ...] | None = None
    optional: bool = False
    float_maximum: float | None = None
    """Of a number that need not be whole: it is above 0, and at most this."""
    allows_zero: bool = False
    """Whether such a number may also be 0."""
    int_maximum: int | None = None
    """Of a whole number: at most this. A program has an entry for each rank and microbatch."""

    def requirement(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.float_maximum is not None:
            return f"a number {'of at least' if self.allows_zero else 'above'} 0, at most {self.float_maximum}"
        if self.int_maximum is not None:
            return f"a whole number from {self.minimum} to {self.int_maximum}" + (
                ", or nothing" if self.optional else ""
            )
        return f"a whole number of at least {self.minimum}" + (", or nothing" if self.optional else "")

    def accepts(self, value: object) -> bool:
        if value is None:
            return self.optional
        # In TOML a whole number has no point.
        if type(value) is not self.value_type and not (self.value_type is float and type(value) is int):
            return False
        if self.float_maximum is not None:
            return (value > 0.0 or (self.allows_zero and value == 0.0)) and value <= self.float_maximum  # type: ignore[operator]
        if self.choices:
            return value in self.choices
        return value >= self.minimum and (self.int_maximum is None or value <= self.int_maximum)  # type: ignore[operator]


FIELD_RULES = {
    "pp": FieldRule(int, supported=(1,)),
    "dp": FieldRule(int, int_maximum=MAX_RANKS),
    "sp": FieldRule(int, int_maximum=MAX_RANKS),
    "tp": FieldRule(int, supported=(1,)),
    "shard": FieldRule(int, optional=True, int_maximum=MAX_RANKS),
    "zero": FieldRule(int, choices=(0, 1, 2, 3)),
    "microbatches": FieldRule(int, int_maximum=MAX_RANKS),
    "schedule": FieldRule(str, choices=("gpipe", "1f1b", "interleaved", "zero-bubble"), supported=("1f1b",)),
    "interleave": FieldRule(int, supported=(1,)),
    "recompute": FieldRule(str, choices=("none", "selective", "full"), supported=("none",)),
    "ring": FieldRule(str, choices=RINGS),
    "ulysses": FieldRule(int, int_maximum=MAX_RANKS),
    "update": FieldRule(str, choices=("after", "in_backward", "in_forward")),
    "sync": FieldRule(str, choices=("step", "local", "server"), supported=("step", "local")),
    "local_steps": FieldRule(int),
    "outer_lr": FieldRule(float, float_maximum=10.0),
    "outer_momentum": FieldRule(float, float_maximum=0.999, allows_zero=True),
    "codec": FieldRule(str, choices=("none", *CODECS)),
    "codec_rank": FieldRule(int),
    "codec_density": FieldRule(float, float_maximum=1.0),
    "codec_refresh_steps": FieldRule(int),
    "offload": FieldRule(str, choices=("none", "states")),
    "precision": FieldRule(str, choices=("keep", *COMPUTE_FORMATS)),
    "reduce_dtype": FieldRule(str, choices=("keep", *REDUCE_FORMATS)),
    "batch_norm": FieldRule(str, choices=("refuse", "local", "sync"), supported=("refuse", "local")),
    "unused": FieldRule(str, choices=("refuse", "allow")),
    "bucket_bytes": FieldRule(int, minimum=1),
    "transport": FieldRule(str, choices=("by-host", "shared", "gloo", "nccl")),
}
FIELDS = tuple(FIELD_RULES)
RENAMED_FIELDS = {"codec_life": "codec_refresh_steps", "reduce": "reduce_dtype"}
"""Old name: new name. Plan files may use either; a run's identity on disk keeps the old one."""


def to_builtin(value: object) -> object:
    """A value of a field as Python's own: NumPy's numbers and texts are as good."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    return str.__str__(value) if isinstance(value, str) else value


def plan_problems(values: Mapping[str, object]) -> list[Problem]:
    """Every problem of a mapping of plan fields: unknown names, wrong kinds, what is not built yet."""
    values, problems = {name: to_builtin(value) for name, value in values.items()}, []
    for name, value in values.items():
        rule = FIELD_RULES.get(name)
        if rule is None:
            close = RENAMED_FIELDS.get(name) or closest_match(name, FIELDS)
            problems.append(Problem(f"{name} = {value!r}", "a field of the plan", close or "fourfold show"))
        elif not rule.accepts(value):
            choices = [each for each in rule.supported or rule.choices if isinstance(each, str)]
            close = closest_match(value, choices) if isinstance(value, str) else None
            problems.append(Problem(f"{name} = {value!r}", rule.requirement(), f"{name} = {close}" if close else ""))
        elif rule.supported is not None and value not in rule.supported:
            only = " or ".join("nothing" if choice is None else str(choice) for choice in rule.supported)
            problems.append(Problem(f"{name} = {value}", f"{only} (the rest is not built yet)", f"{name} = {only}"))
    sp, ulysses = values.get("sp", 1), values.get("ulysses", 1)
    if (
        isinstance(sp, int)
        and isinstance(ulysses, int)
        and FIELD_RULES["ulysses"].accepts(ulysses)
        and FIELD_RULES["sp"].accepts(sp)
    ):
        problem = ulysses_problem(sp, ulysses)
        problems += [] if problem is None else [problem]
    return problems or _too_many_ranks(values) or shard_problems(values)


def _too_many_ranks(values: Mapping[str, Any]) -> list[Problem]:
    size = math.prod(values.get(axis, 1) for axis in ("pp", "dp", "sp", "tp"))
    return [] if size <= MAX_RANKS else [Problem(f"{size} ranks: pp × dp × sp × tp", f"at most {MAX_RANKS}")]


def shard_problems(values: Mapping[str, Any]) -> list[Problem]:
    """A bucket is split over `shard` data ranks, and all of them are taken up by groups of so many."""
    shard, size = values.get("shard"), values.get("dp", 1)
    if shard is None:
        return []
    problems = []
    if size % shard:
        sizes = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        problems.append(Problem(f"shard = {shard} with dp = {size}", "a divisor of dp", f"shard = {sizes}"))
    if shard < size and not values.get("zero", 0):
        need = "zero of at least 1: at zero 0 nothing rests split"
        problems.append(Problem(f"shard = {shard} with zero = 0", need, "zero = 1, or no shard"))
    return problems


def parse_value(name: str, text: str) -> object:
    """The value of a plan field from a command line's `key=value`; a text that is no number stays a text."""
    rule = FIELD_RULES[name]
    if rule.optional and text == "none":
        return None
    if rule.value_type is not str:
        try:
            return rule.value_type(text)
        except ValueError:
            return text
    return text
