"""Refusals: why plans do not fit, and the nearest change with which they would.

change  of one field, the mesh filled up with data ranks; of the memory of a device; of the number of devices
Law: every plan that a change leads to fits, and a refusal names its bytes by category.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fourfold.plan.decide.ask import Ask
from fourfold.plan.decide.decision import Change, Refused
from fourfold.plan.decide.pricing import Pricing
from fourfold.plan.decide.search import first_fitting
from fourfold.plan.decide.space import CHOICES, Space
from fourfold.plan.plan import Plan
from fourfold.plan.predict.prediction import MemoryParts, Prediction
from fourfold.words.errors import PlanError, Problem
from fourfold.words.mesh import AXES
from fourfold.words.units import format_bytes, write_bytes

_T = TypeVar("_T")
MAX_REFUSED = 5  # plans that are explained
DEVICE_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MEMORY_DIGITS = 7  # binary ones, to which the memory that would do is rounded up: less than 2 %


def explain_refused(
    too_large: Sequence[Prediction], ask: Ask, space: Space, pricing: Pricing, *, limit_bytes: float, best: float
) -> tuple[Refused, ...]:
    """The fastest plans that do not fit, one of each mesh, if they would be faster than the answer."""
    by_mesh: dict[object, Prediction] = {}
    for each in sorted(too_large, key=lambda each: each.seconds):
        if each.seconds < best:
            by_mesh.setdefault(each.plan.mesh, each)
    fastest = list(by_mesh.values())[:MAX_REFUSED]
    return tuple(explain(Refused(each.plan, limit_bytes, (), each), ask, space, pricing) for each in fastest)


def explain(refused: Refused, ask: Ask, space: Space, pricing: Pricing) -> Refused:
    """The same refusal with the nearest changes; without any, if memory is not what is wrong."""
    if refused.prediction is None or not refused.excess_bytes:
        return refused
    changes = [_field_change(refused, ask, space, pricing), memory_change(refused.prediction)]
    changes.append(_devices_change(refused, pricing, space.num_devices))
    return dataclasses.replace(refused, changes=tuple(change for change in changes if change is not None))


def memory_problem(memory: MemoryParts, limit_bytes: float, attempt: str = "") -> Problem:
    """What a rank would hold, by category, the largest first, against what it may."""
    parts = sorted(zip(memory._fields, memory, strict=True), key=lambda part: -part[1])
    listing = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts if value)
    got = f"{format_bytes(memory.total)} of a rank: {listing}"
    return Problem(got, f"at most {format_bytes(limit_bytes)}", attempt)


def memory_change(prediction: Prediction) -> Change:
    """The memory of a device with which a plan would fit."""
    needed = math.ceil(prediction.memory.total)
    unit = 2 ** max(0, needed.bit_length() - MEMORY_DIGITS)
    return Change("memory", -(-needed // unit) * unit)


def _field_change(refused: Refused, ask: Ask, space: Space, pricing: Pricing) -> Change | None:
    """Of the changes of one open field with which the plan fits, the one that leaves it fastest."""
    timed = [
        (terms.total, name, value, plan)
        for name, value, plan in _neighbours(refused.plan, ask, space)
        if (terms := _priced(pricing.terms, plan)) is not None
    ]
    # What a rank holds is long to count: the fastest first, until one fits.
    for _, name, value, plan in sorted(timed, key=lambda each: each[0]):
        found = _priced(pricing.estimate, plan)
        if found is not None and found.memory.total <= refused.limit_bytes:
            return Change(name, value, found)
    return None


def _neighbours(plan: Plan, ask: Ask, space: Space) -> Iterator[tuple[str, Any, Plan]]:
    """The plans that differ in one open field, and in the data ranks that are left for it."""
    fields = dataclasses.asdict(plan)
    for name, choose in CHOICES.items():
        if name == "dp" or not ask.is_open(name):
            continue
        for value in choose(space, fields):
            changed = {**fields, name: value}
            inner = math.prod(changed[axis] for axis in AXES if axis != "dp")
            if value == fields[name] or space.num_devices % inner:
                continue
            try:
                changed_plan = Plan.from_dict({**changed, "dp": space.num_devices // inner})
            except PlanError:
                continue  # such as ulysses that no longer divides sp: more than one field would have to change
            is_asked = ask.pinned.get("dp", changed_plan.dp) == changed_plan.dp
            if is_asked and not space.problems(changed_plan):
                yield name, value, changed_plan


def _devices_change(refused: Refused, pricing: Pricing, num_devices: int) -> Change | None:
    """The fewest devices with which the plan fits, if more data ranks share what it splits among them."""
    if not refused.plan.zero:
        return None
    for factor in DEVICE_FACTORS:
        plan = dataclasses.replace(refused.plan, dp=refused.plan.dp * factor)
        larger = _on_devices(pricing, num_devices * factor)
        found = None if larger is None else _priced(larger.estimate, plan)
        if found is not None and found.memory.total <= refused.limit_bytes:
            return Change("devices", num_devices * factor, found)
    return None


def _on_devices(pricing: Pricing, num_devices: int) -> Pricing | None:
    """None: the machine cannot have as many."""
    try:
        return pricing.on_devices(num_devices)
    except PlanError:
        return None


def _priced(price: Callable[[Plan], _T], plan: Plan) -> _T | None:
    """None: the model cannot be laid out so."""
    try:
        return price(plan)
    except PlanError:
        return None


# ---- nothing fits ----------------------------------------------------------------------------------


def nothing_fits(
    too_large: Sequence[Prediction], ask: Ask, space: Space, pricing: Pricing, *, limit_bytes: float
) -> list[Problem]:
    """The plan that holds least, and the least memory, devices or field with which something would fit."""
    leanest = min(too_large, key=lambda each: each.memory.total)
    changes = [memory_change(leanest)]
    for factor in DEVICE_FACTORS:
        more = space._replace(num_devices=space.num_devices * factor)
        larger = _on_devices(pricing, more.num_devices)
        if larger is not None and first_fitting(ask, more, larger, limit_bytes) is not None:
            changes.append(Change("devices", more.num_devices))
            break
    changes += _unpinned(ask, space, pricing, limit_bytes)
    problem = memory_problem(leanest.memory, limit_bytes, ", or ".join(map(change_text, changes)))
    plan = ", ".join(leanest.plan.to_toml().splitlines()[1:])
    return [problem._replace(got=f"no plan fits; the one that holds least ({plan or 'one device'}): {problem.got}")]


def _unpinned(ask: Ask, space: Space, pricing: Pricing, limit_bytes: float) -> Iterator[Change]:
    """The pinned fields, each of which alone stands in the way: with another value something fits."""
    for name in ask.pinned:
        if name in CHOICES:
            freed = Ask(**{**dict.fromkeys(ask.requested, "auto"), **ask.pinned, name: "auto"})
            plan = first_fitting(freed, space, pricing, limit_bytes)
            if plan is not None:
                yield Change(name, getattr(plan, name))


def change_text(change: Change) -> str:
    """A change as a user writes it in an ask."""
    if change.field == "memory" and isinstance(change.value, int):
        return f"memory = {write_bytes(change.value)}"
    return f"{change.field} = {change.value}"
