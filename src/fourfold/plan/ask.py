"""Ask: a plan of which some fields are still open, and the machine that it is for.

pinned     a field that has a value: every answer has the same
open       a field that the planner fills in: one of SEARCHED without a value, or one of ON_REQUEST that is "auto"
Law: `Ask.from_toml(ask.to_toml()) == ask`, and what changes the training is never open by itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from fourfold.plan.decode import DecodeError, format_pair, from_toml, version_problem
from fourfold.plan.plan import VERSION, Plan, candidate_meshes
from fourfold.plan.plan_fields import FIELDS, MAX_RANKS, PLAN_FIELDS, plan_problems
from fourfold.words.errors import PlanError, Problem, closest_match, setting_elsewhere
from fourfold.words.field import to_builtin
from fourfold.words.mesh import AXES, Mesh
from fourfold.words.units import Dimension, read_quantity, write_bytes

# ---- ask -----------------------------------------------------------------------------------------------------------


AUTO = "auto"
NONE = "none"  # in TOML, which has no null: of a field that may be left out, such as `shard`
MACHINE_FIELDS = ("devices", "memory")
SEARCHED = (
    *AXES,
    *("dims", "shard", "zero", "microbatches", "schedule", "stages", "interleave", "max_in_flight", "recompute"),
    *("ring", "ulysses", "sequence_parallel", "update"),
)
"""The fields that are open unless they are pinned: none of them changes what is trained."""
ON_REQUEST = ("precision",)
"""The fields that may be "auto", but are not by themselves."""


def is_left_open(field: str, value: object) -> bool:
    """Whether this value of a plan's field leaves it to the planner: "auto", unless that is a value of the field."""
    return value == AUTO and AUTO not in PLAN_FIELDS[field].choices


@dataclass(frozen=True, init=False)
class Ask:
    """What is to be planned: `Ask(devices=64, memory="80 GiB", tp=8)`.

    devices  how many the plan uses; None: all of the cluster
    memory   of one device, in bytes or as a text such as "80 GiB"; None: what the cluster says
    fields   of a Plan: a value pins a field, "auto" leaves it open

    Raises PlanError with all problems at once.
    """

    devices: int | None
    memory_bytes: int | None
    pinned: Mapping[str, object]
    """By field, in the order of a plan's fields."""
    requested: tuple[str, ...]
    """The fields outside of SEARCHED that are open."""

    def __init__(self, *, devices: object = None, memory: object = None, **fields: object) -> None:
        values = {name: to_builtin(value) for name, value in fields.items()}
        devices, memory = (None if value == AUTO else to_builtin(value) for value in (devices, memory))
        if problems := ask_problems(devices, memory, values):
            raise PlanError(problems, where="the ask")
        own = {
            "devices": devices,
            "memory_bytes": _memory_bytes(memory),
            "pinned": {
                name: values[name] for name in FIELDS if name in values and not is_left_open(name, values[name])
            },
            "requested": tuple(name for name in ON_REQUEST if values.get(name) == AUTO),
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash((self.devices, self.memory_bytes, tuple(self.pinned.items()), self.requested))

    def is_open(self, field: str) -> bool:
        """Whether the planner chooses this field of a plan."""
        return field in self.requested or (field in SEARCHED and field not in self.pinned)

    def with_changes(self, **changes: object) -> "Ask":
        """The same ask with other values for these fields, `devices` and `memory` among them."""
        values = {"devices": self.devices, "memory": self.memory_bytes, **dict.fromkeys(self.requested, AUTO)}
        return Ask(**{**values, **self.pinned, **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, object], *, where: str = "the ask") -> Self:
        """The ask with these values. Raises PlanError."""
        optional = {name for name, rule in PLAN_FIELDS.items() if rule.is_optional}
        try:
            return cls(
                **{name: None if value == NONE and name in optional else value for name, value in values.items()}
            )
        except PlanError as error:
            raise PlanError(error.problems, where=where) from None

    @classmethod
    def from_toml(cls, text: str, *, where: str = "ask.toml") -> Self:
        """Read an ask as `to_toml` writes it: flat keys and `version = 1`, as a plan has them. Raises PlanError."""
        try:
            values = from_toml(text)
        except DecodeError as error:
            raise PlanError(Problem(str(error), "valid TOML"), where=where) from None
        version = values.pop("version", None)
        if type(version) is not int or version != VERSION:
            raise PlanError(version_problem(version, VERSION), where=where)
        return cls.from_dict(values, where=where)

    def to_toml(self) -> str:
        """The ask as TOML: what is pinned, and what is open on request."""
        lines = [f"version = {VERSION}"]
        if self.devices is not None:
            lines.append(format_pair("devices", self.devices))
        if self.memory_bytes is not None:
            lines.append(format_pair("memory", write_bytes(self.memory_bytes)))
        lines += [format_pair(name, NONE if value is None else value) for name, value in self.pinned.items()]
        lines += [format_pair(name, AUTO) for name in self.requested]
        return "\n".join(lines) + "\n"


# ---- problems --------------------------------------------------------------------------------------


def ask_problems(devices: object, memory: object, values: Mapping[str, object]) -> list[Problem]:
    """Every problem of an ask that needs neither a task nor a machine."""
    problems = _machine_problems(devices, memory)
    for name, value in values.items():
        if name not in FIELDS:
            known = (*MACHINE_FIELDS, *FIELDS)
            close = setting_elsewhere(name, known) or closest_match(name, known)
            problems.append(Problem(f"{name} = {value!r}", "a field of a plan, devices or memory", close or ""))
        elif is_left_open(name, value) and name not in (*SEARCHED, *ON_REQUEST):
            default = getattr(Plan(), name)
            need = "a value: the planner chooses only what leaves the training as it is and has a price"
            problems.append(Problem(f'{name} = "auto"', need, f"{name} = {default!r}"))
    pinned = {name: value for name, value in values.items() if name in FIELDS and not is_left_open(name, value)}
    problems += plan_problems(_completed(pinned))
    return problems or _mesh_problems(devices, pinned)


def _memory_bytes(memory: object) -> int | Problem | None:
    """The bytes that are meant, or what is wrong with them."""
    if memory is None or (type(memory) is int and memory > 0):
        return memory  # type: ignore[return-value]
    read = read_quantity("memory", memory, Dimension.BYTES)
    return read if isinstance(read, Problem) else max(1, int(read))


def _machine_problems(devices: object, memory: object) -> list[Problem]:
    problems = []
    if devices is not None and not (type(devices) is int and 1 <= devices <= MAX_RANKS):
        problems.append(Problem(f"devices = {devices!r}", f"a whole number from 1 to {MAX_RANKS}", "devices = 8"))
    if isinstance(num_bytes := _memory_bytes(memory), Problem):
        problems.append(num_bytes)
    return problems


def _completed(pinned: Mapping[str, object]) -> dict[str, object]:
    """The pinned fields, and for open ones that they depend on a value that suits them."""
    implied: dict[str, object] = {}
    if "ulysses" in pinned:
        implied["cp"] = pinned["ulysses"]
    if pinned.get("shard") is not None:
        implied |= {"dp": pinned["shard"], "zero": 1}
    return {**implied, **pinned}


def _mesh_problems(devices: object, pinned: Mapping[str, object]) -> list[Problem]:
    """Why pinned axes cannot be those of so many devices."""
    axes = {axis: pinned[axis] for axis in AXES if axis in pinned}
    if not isinstance(devices, int) or not axes:
        return []
    sizes = [size for size in axes.values() if isinstance(size, int)]
    size, is_whole = math.prod(sizes), len(axes) == len(AXES)
    if size == devices or (not is_whole and devices % size == 0):
        return []
    got = " × ".join(axes) + " = " + " × ".join(map(str, sizes)) + (f" = {size}" if len(sizes) > 1 else "")
    if is_whole:
        fitting = candidate_meshes(devices, Mesh(**dict(zip(axes, sizes, strict=True))))[0]
        attempt = ", ".join(f"{axis} = {fitting.axis_size(axis)}" for axis in AXES) + f", or devices = {size}"
        return [Problem(f"{got} with devices = {devices}", f"the number of devices, {devices}", attempt)]
    above = -(-devices // size) * size
    below = devices // size * size
    attempt = f"devices = {above}" if not below else f"devices = {below} or {above}"
    return [Problem(f"{got} with devices = {devices}", f"a divisor of {devices}", attempt)]
