"""Comparison: the training of a mesh against that of one device, number by number, and the report.

kind     what is compared; an "unsaved buffer" is in no state dict: a cache, on which training may depend or not
want     the one device's, in float64; `rounded`: the same training of one device with the precision under test
exact    deviation |a − b| / max(1, |b|), the largest of a tensor; the bound is 1e-9
rounded  deviation rms(a − want); the bound is FACTOR times what the precision does to one device, rms(rounded − want),
         that of the tensor and that of all tensors of its kind, in proportion to their size
Law: a number that is missing, not finite or of another shape deviates infinitely; no bound is infinite.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.words.errors import Problem
from fourfold.words.terminal_text import escape_controls, table_lines

TOLERANCE, FACTOR = 1e-9, 4.0
LOSS, OUTPUT, GRADIENT, WEIGHT, BUFFER, UNSAVED, STATE = KINDS = (
    "loss",
    "output",
    "gradient",
    "weight",
    "buffer",
    "unsaved buffer",
    "optimizer state",
)
MAX_SHOWN = 40  # tensors; if there are more, those that deviate most
EXACT_BOUND = f"{TOLERANCE:.0e} · max(1, |b|): the mesh and one device both compute in float64"
State = Mapping[str, Mapping[str, Tensor]]
"""By kind and name: the numbers after a step."""


class Deviation(NamedTuple):
    """How far a tensor is from one device's, and how far it may be. `step`: counted from 1."""

    value: float
    bound: float
    step: int

    @property
    def is_over(self) -> bool:
        return not self.value <= self.bound

    @property
    def ratio(self) -> float:
        return math.inf if not self.value < math.inf else self.value / self.bound


@dataclass
class VerifyResult:
    """What a comparison found. `str` of it is the text that `fourfold verify` prints.

    title        what was compared
    bound        how far numbers may deviate, and where this comes from; `is_measured`: from trainings of one device
    worst        kind -> name -> Deviation, where the tensor is furthest beyond its bound, or nearest
    first        kind -> [name, step]: the first tensor beyond its bound
    losses       by step: [deviation, bound]
    randomness   what drew random numbers while it trained, which differ between meshes
    notes        what the comparison does not cover
    """

    title: str
    bound: str = EXACT_BOUND
    is_measured: bool = False
    num_steps: int = 0
    worst: dict[str, dict[str, Any]] = field(default_factory=dict)
    first: dict[str, Sequence[Any]] = field(default_factory=dict)
    losses: list[Sequence[float]] = field(default_factory=list)
    num_dropouts: int = 0
    randomness: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def max_deviation(self) -> float:
        """The largest deviation of all numbers."""
        each = [d[0] for named in self.worst.values() for d in named.values()] + [d[0] for d in self.losses]
        return math.inf if any(math.isnan(value) for value in each) else max(each, default=0.0)

    @property
    def problems(self) -> list[Problem]:
        """Why the plan is not shown to train as one device does; none if it is."""
        if not self.num_steps:
            return [Problem("no step", "at least one step to compare, of ff.parallelize or ff.DistributedOptimizer")]
        over = [kind for kind in KINDS if kind in self.first]
        if over == [UNSAVED]:
            return []  # losses and weights are one device's: training does not depend on it
        if self.randomness and (over or self.is_measured):  # what one device draws would be part of a measured bound
            got = f"random numbers drawn by {' and '.join(self.randomness)}: each mesh draws others"
            attempt = "numbers that follow from the batch, or none while you verify"
            return [Problem(got, "a training that can be compared", attempt)]
        return [self._problem(kind) for kind in over]

    def _problem(self, kind: str) -> Problem:
        name, step, value, bound, others = self.first[kind]
        more = f", and {others} more" if others else ""
        got = f"the {kind}{f' of {name}' if name else ''} deviates by {value:.1e} at step {step}, the first{more}"
        return Problem(got, f"at most {bound:.1e}", "the same with one axis of the mesh at a time")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The table, the bound, and what was left out."""
        lines = [self.title, "", *self._table(), ""]
        lines += (
            [f"  loss, by step  {'  '.join(_number(value) for value, _ in self.losses)}", ""] if self.losses else []
        )
        lines += [f"largest deviation {self.max_deviation:.1e}", f"bound: {self.bound}"]
        if self.num_dropouts:
            lines.append("dropout is left out: each rank draws its own masks")
        if self.randomness:
            who = " and ".join(self.randomness)
            lines.append(f"{who} draws random numbers while it trains: they differ between meshes")
        if [*self.first] == [UNSAVED]:
            lines.append(f"{self._problem(UNSAVED).got}; nothing else does, so training does not depend on it")
        lines += self.notes
        return [*lines, "the plan trains as one device does"] if self.ok else lines

    def _table(self) -> list[str]:
        """The worst deviation of each parameter and buffer, a column for each kind; `*`: beyond its bound."""
        cells: dict[str, dict[str, Deviation]] = {}
        for kind, named in self.worst.items():
            for name, found in named.items():
                row = cells.setdefault(name.partition(" (")[0], {})
                row[kind] = max(row.get(kind, Deviation(0.0, 1.0, 0)), Deviation(*found), key=lambda each: each.ratio)
        kinds = [kind for kind in KINDS if self.worst.get(kind)]
        by_ratio = sorted(cells, key=lambda name: -max(each.ratio for each in cells[name].values()))
        shown = {*by_ratio[:MAX_SHOWN]}
        rows = [("tensor", *(f"{kind.removeprefix('optimizer ')} " for kind in kinds))]
        rows += [
            (escape_controls(name), *(_cell(row.get(kind)) for kind in kinds))
            for name, row in cells.items()
            if name in shown
        ]
        lines = [f"  {line}" for line in table_lines(rows, "<" + ">" * len(kinds))]
        rest = len(cells) - len(shown)
        return [*lines, f"  and {rest} more, which deviate no more than these"] if rest else lines


class Comparison:
    """Adds up a `VerifyResult`, a step at a time.

    compute_eps  of the precision under test; 0.0: exact
    """

    def __init__(self, result: VerifyResult, *, compute_eps: float = 0.0) -> None:
        self.result, self._eps = result, compute_eps

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """The computation turns out to be in another precision, by autocast."""
        self._eps = torch.finfo(dtype).eps

    def add(self, step: int, got: State, want: State, rounded: State | None = None) -> None:
        """Compare what is known after a step, or of it."""
        self.result.num_steps = max(self.result.num_steps, step)
        for kind, named in want.items():
            held = got.get(kind, {})
            near = None if rounded is None else rounded[kind]
            self.result.is_measured |= near is not None
            bounds = dict.fromkeys(named, TOLERANCE) if near is None else self._bounds(kind, named, near)
            for name, tensor in named.items():
                value = _distance(held.get(name), tensor, is_exact=near is None)
                self._record(kind, name, Deviation(value, bounds[name], step))

    def _bounds(self, kind: str, want: Mapping[str, Tensor], rounded: Mapping[str, Tensor]) -> dict[str, float]:
        """By name, FACTOR times what the precision does to one device: to this tensor, and to all of the kind.

        The latter at least one rounding of each number. A loss is one number, which may come out right by chance: one
        rounding in the precision of the computation. What is zero but for rounding has the noise of float64.
        """
        lost = math.sqrt(sum(_square(rounded[name] - tensor) for name, tensor in want.items()))
        size = math.sqrt(sum(map(_square, want.values())))
        share = max(
            self._eps if kind in (LOSS, OUTPUT) else torch.finfo(torch.float32).eps, lost / size if size else 0.0
        )
        noise = TOLERANCE * size / math.sqrt(max(1, sum(tensor.numel() for tensor in want.values())))
        noise = max(noise, torch.finfo(torch.float32).tiny)
        return {
            name: FACTOR * (_rms(rounded[name] - tensor) + share * _rms(tensor)) + noise
            for name, tensor in want.items()
        }

    def _record(self, kind: str, name: str, found: Deviation) -> None:
        if kind == LOSS:
            self.result.losses.append(found[:2])
        else:
            named = self.result.worst.setdefault(kind, {})
            if name not in named or found.ratio > Deviation(*named[name]).ratio:
                named[name] = found
        if found.is_over:
            first = self.result.first.get(kind)
            is_first = first is None
            here = (name, found.step, found.value, found.bound, 0) if first is None else first
            self.result.first[kind] = here if is_first else (*here[:4], here[4] + (found.step == here[1]))


def _distance(a: Tensor | None, b: Tensor, *, is_exact: bool) -> float:
    """How far a tensor is from one device's; infinite where they cannot be compared."""
    if a is None or a.shape != b.shape:
        return math.inf
    a, b = to_float64(a.to(b.device)), to_float64(b)
    difference = (a - b).abs()
    exact = (difference / b.abs().clamp(min=1.0)).max().item() if is_exact and a.numel() else 0.0
    value = exact if is_exact else _rms(difference)
    return value if math.isfinite(value) else math.inf


def to_float64(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _square(tensor: Tensor) -> float:
    return to_float64(tensor).abs().double().square().sum().item()


def _rms(tensor: Tensor) -> float:
    return math.sqrt(_square(tensor) / max(1, tensor.numel()))


def _cell(found: Deviation | None) -> str:
    return "" if found is None else _number(found.value) + ("*" if found.is_over else " ")


def _number(deviation: float) -> str:
    return f"{deviation:8.1e}"
