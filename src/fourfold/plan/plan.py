"""Plan: how a task is laid over the mesh. Decisions only, plain scalars, TOML in and out.

rule  what a field may hold: its kind, its choices or least value, and which of them are built so far
Law: `Plan.from_toml(plan.to_toml()) == plan`, and an impossible plan is refused with all its problems at once.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fourfold.plan.codec import CODECS, CodecSpec
from fourfold.plan.data import ShardGroups
from fourfold.plan.decode import DecodeError, from_toml
from fourfold.plan.precision import COMPUTE_FORMATS, REDUCE_FORMATS
from fourfold.plan.sequence import RINGS, ulysses_problem
from fourfold.words.errors import PlanError, Problem, closest_match
from fourfold.words.mesh import Mesh

VERSION = 1
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
# Fields that nothing reads but in some plans: what a plan needs for that, and whether it has it.
APPLIES_WHEN: dict[str, tuple[str, Callable[["Plan"], bool]]] = {
    "ring": ("sp above ulysses", lambda plan: plan.sp > plan.ulysses),
    "local_steps": ("sync = local", lambda plan: plan.sync == "local"),
    "outer_lr": ("sync = local", lambda plan: plan.sync == "local"),
    "outer_momentum": ("sync = local", lambda plan: plan.sync == "local"),
    "codec_rank": ("codec = powersgd", lambda plan: plan.codec == "powersgd"),
    "codec_density": ("codec = topk or dct", lambda plan: plan.codec in ("topk", "dct")),
    "codec_refresh_steps": ("codec = dct", lambda plan: plan.codec == "dct"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a task is laid over pp · dp · sp · tp ranks. All scalars; see `docs/plan.md` for each.

    Raises PlanError where a value is impossible, or asks for what is not built yet.
    """

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    shard: int | None = None
    zero: int = 0
    microbatches: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    recompute: str = "none"
    ring: str = "zigzag"
    ulysses: int = 1
    update: str = "after"
    sync: str = "step"
    local_steps: int = 10
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    codec: str = "none"
    codec_rank: int = 4
    codec_density: float = 0.01
    codec_refresh_steps: int = 100
    offload: str = "none"
    precision: str = "keep"
    reduce_dtype: str = "keep"
    batch_norm: str = "refuse"
    unused: str = "refuse"
    bucket_bytes: int = 4 * 2**20
    transport: str = "by-host"

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            object.__setattr__(self, name, _to_builtin(value))
        problems = plan_problems(dataclasses.asdict(self))
        if problems:
            raise PlanError(problems, where="the plan")

    @property
    def codec_spec(self) -> CodecSpec | None:
        """The codec and its parameters, or None."""
        if self.codec == "none":
            return None
        return CodecSpec(
            self.codec,
            matrix_rank=self.codec_rank,
            density=self.codec_density,
            refresh_steps=self.codec_refresh_steps,
        )

    @property
    def ineffective_fields(self) -> dict[str, str]:
        """The fields that are not at their defaults, and that nothing reads: what each of them would need."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {
            name: need
            for name, (need, is_read) in APPLIES_WHEN.items()
            if getattr(self, name) != defaults[name] and not is_read(self)
        }

    @property
    def identity_fields(self) -> dict[str, object]:
        """The decisions that make another training of it, and not only another way to the same weights."""
        names = [] if self.codec == "none" else [name for name in FIELDS if name.startswith("codec")]
        names += [name for name in ("precision", "reduce_dtype") if getattr(self, name) != "keep"]
        if self.sync == "local":
            # Each of the ranks learns by itself: their number matters too.
            names += ["sync", "local_steps", "outer_lr", "outer_momentum", "dp"]
        on_disk = {
            new: old for old, new in RENAMED_FIELDS.items()
        }  # a run's identity keeps the names it was saved under
        return {on_disk.get(name, name): getattr(self, name) for name in names}

    @property
    def num_shards(self) -> int:
        """Among how many ranks that which rests split is split; 1: all of it rests whole."""
        return (self.shard or self.dp) * self.sp if self.zero else 1

    @property
    def sync_interval(self) -> int:
        """Weights are the same on all ranks after every so many steps."""
        return self.local_steps if self.sync == "local" else 1

    @property
    def reduce_group_size(self) -> int:
        """Ranks whose gradients are added up, and that share what rests split: dp · sp."""
        return self.dp * self.sp

    @property
    def shard_groups(self) -> ShardGroups:
        """The ranks that share what rests split, and how often there are all shares of it."""
        shard = self.num_shards if self.zero else self.reduce_group_size
        return ShardGroups(shard, self.reduce_group_size // shard)

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp, dp=self.dp, sp=self.sp, tp=self.tp)

    @classmethod
    def from_dict(cls, values: Mapping[str, object], *, where: str = "the plan") -> Self:
        """The plan with these values, the rest at their defaults; PlanError tells all problems at once."""
        problems = plan_problems(values)
        if problems:
            raise PlanError(problems, where=where)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_toml(cls, text: str, *, where: str = "plan.toml") -> Self:
        """Read a plan as `to_toml` writes it: flat keys and `version = 1`."""
        try:
            values = from_toml(text)
        except DecodeError as error:
            raise PlanError(Problem(str(error), "TOML with flat keys", "dp = 2"), where=where) from None
        version = values.pop("version", None)
        if type(version) is not int or version != VERSION:
            got = "no version" if version is None else f"version = {version!r}"
            problem = Problem(got, f"version = {VERSION}", f"add a line version = {VERSION}")
            raise PlanError([problem, *plan_problems(values)], where=where)
        both = [
            Problem(f"{old} and {new}", "one of them: they are the same field", f"{new} = {values[new]}")
            for old, new in RENAMED_FIELDS.items()
            if old in values and new in values
        ]
        if both:
            raise PlanError(both, where=where)
        return cls.from_dict({RENAMED_FIELDS.get(name, name): value for name, value in values.items()}, where=where)

    def to_toml(self, *, defaults: bool = False) -> str:
        """The plan as TOML: what differs from the defaults and the mesh, or everything."""
        lines = [f"version = {VERSION}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (defaults or value != field.default):
                lines.append(f'{field.name} = "{value}"' if isinstance(value, str) else f"{field.name} = {value}")
        return "\n".join(lines) + "\n"


def _to_builtin(value: object) -> object:
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
    values, problems = {name: _to_builtin(value) for name, value in values.items()}, []
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


def candidate_meshes(size: int) -> list[Mesh]:
    """The meshes of `size` ranks that this version can build, those with more samples at once first."""
    return [Mesh(dp=size // sp, sp=sp) for sp in range(1, size + 1) if size % sp == 0]
