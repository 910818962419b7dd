"""Compares what two checkouts have written: facts as JSON, tensors by their bytes.

difference  a group of facts, the place in it, and the two values there
Law: equal means equal bits. A float in JSON is compared by its repr, so 0.0 differs from -0.0, and nan equals nan.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
SHOWN = 90  # characters of a value


class Difference(NamedTuple):
    """One difference. `size` is the largest difference of numbers, 0 if none differ."""

    group: str
    where: str
    detail: str
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.group:<14} {self.where}: {self.detail}"


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def values(self) -> np.ndarray | None:
        """As float64; None if it does not hold floating-point numbers."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.content, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
        kind = FLOATS.get(self.dtype)
        return None if kind is None else np.frombuffer(self.content, kind).astype(np.float64)


def read_tensors(path: Path) -> dict[str, Stored]:
    """All tensors of a safetensors file."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    return {
        name: Stored(
            entry["dtype"],
            tuple(entry["shape"]),
            content[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def compare_tensors(old: dict[str, Stored], new: dict[str, Stored], *, group: str, where: str) -> list[Difference]:
    """Compare names, dtypes, shapes and bytes. Of tensors with different values, one difference names the largest."""
    found = _missing(old, new, group=group, where=where)
    unequal: list[tuple[float, str]] = []
    for name in [name for name in old if name in new]:
        a, b = old[name], new[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            found.append(
                Difference(group, where, f"{name}: {a.dtype} {list(a.shape)} | {b.dtype} {list(b.shape)}", math.inf)
            )
        elif a.content != b.content:
            unequal.append((_largest(a, b), name))
    if unequal:
        size, name = max(unequal)
        detail = f"{len(unequal)} of {len(old)} tensors, by at most {size:.3g} in {name}"
        found.append(Difference(group, where, detail, size))
    return found


def _missing(old: dict[str, Any], new: dict[str, Any], *, group: str, where: str) -> list[Difference]:
    """A difference for the names that only one of the two has."""
    found = []
    for side, one, other in (("OLD", old, new), ("NEW", new, old)):
        if names := [name for name in one if name not in other]:
            value = one[names[0]]
            shown = "" if isinstance(value, Stored) or len(names) > 1 else f": {_short(value)}"
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found.append(Difference(group, where, f"only {side} has {names[0]}{rest}{shown}"))
    return found


def _largest(a: Stored, b: Stored) -> float:
    one, other = a.values(), b.values()
    if one is None or other is None:
        return math.inf
    with np.errstate(invalid="ignore"):
        distances = np.abs(one - other)
    return float(np.nan_to_num(distances, nan=math.inf).max(initial=0.0))


def compare_facts(old: Any, new: Any, *, group: str, where: str = "") -> list[Difference]:
    """Where two JSON values differ. Of lists, the first different place and the number of others."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = _missing(old, new, group=group, where=where)
        for name in [name for name in old if name in new]:
            found += compare_facts(old[name], new[name], group=group, where=f"{where} {name}".strip())
        return found
    if isinstance(old, list) and isinstance(new, list):
        return _compare_lists(old, new, group=group, where=where)
    if json.dumps(old) == json.dumps(new):
        return []
    size = abs(old - new) if _is_number(old) and _is_number(new) else 0.0
    detail = f"{_short(old)} | {_short(new)}" + (f", difference {size:.3g}" if size else "")
    return [Difference(group, where or "value", detail, size)]


def _compare_lists(old: list[Any], new: list[Any], *, group: str, where: str) -> list[Difference]:
    unequal = [place for place, (a, b) in enumerate(zip(old, new, strict=False)) if json.dumps(a) != json.dumps(b)]
    found = []
    if len(old) != len(new):
        longer, name = (old, "OLD") if len(old) > len(new) else (new, "NEW")
        place = unequal[0] if unequal else min(len(old), len(new))
        detail = f"{len(old)} | {len(new)} entries; at {place} {name} has {_short(longer[place])}"
        found.append(Difference(group, where, detail))
    elif unequal:
        place = unequal[0]
        rest = f" (the first of {len(unequal)} of {len(old)} entries)" if len(unequal) > 1 else ""
        if isinstance(old[place], dict) and isinstance(new[place], dict):
            return compare_facts(old[place], new[place], group=group, where=f"{where} [{place}]{rest}".strip())
        sizes = [abs(old[at] - new[at]) for at in unequal if _is_number(old[at]) and _is_number(new[at])]
        largest = f", largest difference {max(sizes):.3g}" if sizes else ""
        detail = f"[{place}] {_short(old[place])} | {_short(new[place])}{largest}{rest}"
        found.append(Difference(group, where or "list", detail, max(sizes, default=0.0)))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"


def compare_records(old: str, new: str, size: int) -> list[Difference]:
    """Compare the records that `same_child` wrote for a case on `size` ranks; `old` and `new` lack rank and suffix."""
    found: list[Difference] = []
    for rank in range(size):
        facts = [json.loads(Path(f"{file}-{rank}.json").read_text()) for file in (old, new)]
        for group in dict.fromkeys([*facts[0], *facts[1]]):
            name = "weights" if group.startswith("weights") else group
            found += compare_facts(facts[0].get(group), facts[1].get(group), group=name, where=f"rank {rank}")
    stored = [read_tensors(Path(f"{file}-0.safetensors")) for file in (old, new)]
    return found + compare_tensors(*stored, group="weights", where="state")
