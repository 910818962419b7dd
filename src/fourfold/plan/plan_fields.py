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

from fourfold.axes.context.rules.layout import RINGS, ulysses_problem
from fourfold.axes.pipeline.rules.division import stages_problems
from fourfold.axes.pipeline.rules.edges import EDGES
from fourfold.axes.pipeline.rules.schedules import SCHEDULES
from fourfold.axes.tensor.rules.dims import dims_problems
from fourfold.plan.codec import CODECS
from fourfold.plan.precision import COMPUTE_FORMATS, REDUCE_FORMATS
from fourfold.words.errors import Problem, closest_match

BOOL_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
MAX_RANKS = 2**20  # ranks or microbatches; beyond any machine, and a plan can still be shown


@dataclass(frozen=True)
class FieldRule:
    """What one field may hold. A text without choices is checked by itself: see `plan_problems`.

    supported      the choices that this version can build; None = all
    optional       None is legal too
    minimum        of an integer; `int_maximum`: its greatest value. A program has an entry per rank and microbatch, so
                   their numbers are bounded
    float_maximum  makes the field a real number above 0; `allows_zero`: or 0
    """

    type: type
    choices: tuple[Any, ...] = ()
    minimum: int = 1
    supported: tuple[Any, ...] | None = None
    optional: bool = False
    float_maximum: float | None = None
    allows_zero: bool = False
    int_maximum: int | None = None

    def requirement(self) -> str:
        """What an error says is needed."""
        if self.type is bool:
            return "true or false"
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.type is str:
            return "a text"
        if self.float_maximum is not None:
            return f"a number {'of at least' if self.allows_zero else 'above'} 0, at most {self.float_maximum}"
        if self.int_maximum is not None:
            return f"a whole number from {self.minimum} to {self.int_maximum}" + (
                ", or nothing" if self.optional else ""
            )
        return f"a whole number of at least {self.minimum}" + (", or nothing" if self.optional else "")

    @property
    def is_text(self) -> bool:
        """Whether it holds any text, in which commas are nothing special, such as `stages = "4,1,4,3"`."""
        return self.type is str and not self.choices

    def accepts(self, value: object) -> bool:
        """Whether the field may hold this value, in this version or a later one."""
        if value is None:
            return self.optional
        # An integer is a legal float: in TOML a whole number has no decimal point.
        if type(value) is not self.type and not (self.type is float and type(value) is int):
            return False
        if self.type is bool:
            return True
        if self.float_maximum is not None:
            return (value > 0.0 or (self.allows_zero and value == 0.0)) and value <= self.float_maximum  # type: ignore[operator]
        if self.choices or self.type is str:
            return not self.choices or value in self.choices
        return value >= self.minimum and (self.int_maximum is None or value <= self.int_maximum)  # type: ignore[operator]


FIELD_RULES = {
    "pp": FieldRule(int, int_maximum=MAX_RANKS),
    "dp": FieldRule(int, int_maximum=MAX_RANKS),
    "cp": FieldRule(int, int_maximum=MAX_RANKS),
    "tp": FieldRule(int, int_maximum=MAX_RANKS),
    "dims": FieldRule(str),
    "shard": FieldRule(int, optional=True, int_maximum=MAX_RANKS),
    "zero": FieldRule(int, choices=(0, 1, 2, 3)),
    "microbatches": FieldRule(int, int_maximum=MAX_RANKS),
    "schedule": FieldRule(str, choices=tuple(SCHEDULES)),
    "stages": FieldRule(str),
    "interleave": FieldRule(int, int_maximum=MAX_RANKS),
    "max_in_flight": FieldRule(int, optional=True, int_maximum=MAX_RANKS),
    "program": FieldRule(str),
    "recompute": FieldRule(str, choices=("none", "selective", "full")),
    "edge": FieldRule(str, choices=EDGES),
    "edge_density": FieldRule(float, float_maximum=1.0),
    "ring": FieldRule(str, choices=RINGS),
    "ulysses": FieldRule(int, int_maximum=MAX_RANKS),
    "sequence_parallel": FieldRule(bool),
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
    "batch_norm": FieldRule(str, choices=("error", "local", "sync")),
    "unused": FieldRule(str, choices=("error", "allow")),
    "bucket_bytes": FieldRule(int, minimum=1),
    "transport": FieldRule(str, choices=("auto", "shared", "gloo", "nccl")),
}
FIELDS = tuple(FIELD_RULES)
BUILTINS = (int, str, float, bool, type(None))


def to_builtin(value: object) -> object:
    """A field's value as a builtin type: NumPy numbers and strings are converted."""
    if type(value) in BUILTINS:
        return value  # most values; asking an abstract class takes a microsecond
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    return str.__str__(value) if isinstance(value, str) else value


def plan_problems(values: Mapping[str, object]) -> list[Problem]:
    """Every problem of a mapping of plan fields: unknown names, illegal values, values that are not built yet."""
    values = {name: to_builtin(value) for name, value in values.items()}
    problems: list[Problem] = []
    for name, value in values.items():
        rule = FIELD_RULES.get(name)
        if rule is None:
            close = closest_match(name, FIELDS)
            problems.append(Problem(f"{name} = {value!r}", "a field of the plan", close or "fourfold show"))
        elif not rule.accepts(value):
            choices = [choice for choice in rule.supported or rule.choices if isinstance(choice, str)]
            close = closest_match(value, choices) if isinstance(value, str) else None
            problems.append(Problem(f"{name} = {value!r}", rule.requirement(), f"{name} = {close}" if close else ""))
        elif rule.supported is not None and value not in rule.supported:
            built = " or ".join(map(str, rule.supported))
            need = f"{built} (other values are not implemented yet)"
            problems.append(Problem(f"{name} = {value}", need, f"{name} = {built}"))
    cp, ulysses = values.get("cp", 1), values.get("ulysses", 1)
    if (
        isinstance(cp, int)
        and isinstance(ulysses, int)
        and FIELD_RULES["ulysses"].accepts(ulysses)
        and FIELD_RULES["cp"].accepts(cp)
    ):
        problem = ulysses_problem(cp, ulysses)
        problems += [] if problem is None else [problem]
    if isinstance(dims := values.get("dims"), str):
        problems += dims_problems(dims)
    if isinstance(stages := values.get("stages"), str):
        problems += stages_problems(stages)
    return problems or _too_many_ranks(values) or shard_problems(values)


def _too_many_ranks(values: Mapping[str, Any]) -> list[Problem]:
    size = math.prod(values.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    return [] if size <= MAX_RANKS else [Problem(f"{size} ranks: pp × dp × cp × tp", f"at most {MAX_RANKS}")]


def shard_problems(values: Mapping[str, Any]) -> list[Problem]:
    """The problems of `shard`: groups of that many ranks must divide the data ranks, and something must be split."""
    shard, size = values.get("shard"), values.get("dp", 1)
    if shard is None:
        return []
    problems = []
    if size % shard:
        sizes = ", ".join(str(divisor) for divisor in range(1, size + 1) if size % divisor == 0)
        problems.append(Problem(f"shard = {shard} with dp = {size}", "a divisor of dp", f"shard = {sizes}"))
    if shard < size and not values.get("zero", 0):
        need = "zero of at least 1: with zero = 0 nothing is sharded"
        problems.append(Problem(f"shard = {shard} with zero = 0", need, "zero = 1, or no shard"))
    return problems


def parse_value(name: str, text: str) -> object:
    """The value of a plan field given as `key=value` on a command line; what is no number stays a string."""
    rule = FIELD_RULES[name]
    if rule.optional and text == "none":
        return None
    if rule.type is bool:
        return BOOL_WORDS.get(text.lower(), text)
    if rule.type is not str:
        try:
            return rule.type(text)
        except ValueError:
            return text
    return text


def field_text(value: object) -> str:
    """A value as a word of a command line has it: what `parse_value` reads."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
