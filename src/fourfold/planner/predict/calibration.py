"""Calibration: what was measured of one machine, and the file that it is stored in.

machine  what the measurements hold for: processor, cores, torch, threads of a rank, ranks of a host
segment  a part of a model as ranks of a plan compute it; equal parts have the same signature
Law: decode_calibration(encode_calibration(calibration)) == calibration; what was measured elsewhere is refused.
Law: what is larger never costs less, and nothing costs less than nothing.
"""

import hashlib
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from fourfold.environment.atomic_file import write_atomically
from fourfold.plan.decode import DecodeError, from_json, read_bounded
from fourfold.plan.plan import Plan
from fourfold.planner.predict.facts import Collective, FactsSource, SegmentFacts
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.layout import Change

# ---- curves --------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """Seconds at sizes, in order. Between them it is linear; beyond the ends, the slope beside them goes on."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Self:
        """The curve nearest to measured points that never falls; points of one size count with their mean."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(size, []).append(seconds)
        sizes = sorted(by_size)
        return cls(tuple(sizes), tuple(_never_falling([sum(by_size[s]) / len(by_size[s]) for s in sizes])))

    def at(self, size: float) -> float:
        """Seconds at a size. A single point is scaled."""
        if len(self.sizes) == 1:
            return self.seconds[0] * size / self.sizes[0]
        high = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        left, right = self.sizes[high - 1], self.sizes[high]
        low_seconds, slope = self.seconds[high - 1], (self.seconds[high] - self.seconds[high - 1]) / (right - left)
        return max(0.0, low_seconds + slope * (size - left))

    def times(self, factor: float) -> "Curve":
        """The same sizes, with every second multiplied."""
        return Curve(self.sizes, tuple(second * factor for second in self.seconds))


def _never_falling(values: Sequence[float]) -> list[float]:
    """The never-falling sequence with the least squared distance: neighbours that fall share their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (second, n), (first, m) = blocks.pop(), blocks.pop()
            blocks.append(((first * m + second * n) / (m + n), m + n))
    return [mean for mean, count in blocks for _ in range(count)]


# ---- calibration ---------------------------------------------------------------------------------------------------


CALIBRATION_VERSION = 2
CACHE_VARIABLE = "XDG_CACHE_HOME"


class CalibrationError(FourfoldError):
    """A calibration that cannot be made, read or used."""


class MachineIdentity(NamedTuple):
    """What measurements hold for. `threads`: of one rank."""

    processor: str
    cores: int
    torch: str
    threads: int
    ranks_per_host: int
    hosts: int = 1


class Cut(NamedTuple):
    """How a plan's ranks divide a sample: segments with other cuts are other segments."""

    tp: int = 1
    cp: int = 1
    ring: str = ""
    ulysses: int = 1
    sequence_parallel: bool = False
    precision: str = "keep"

    @classmethod
    def of(cls, plan: Plan) -> "Cut":
        """The cut of a plan; fields without effect are at their defaults."""
        has_ring = plan.cp > plan.ulysses
        return cls(
            plan.tp,
            plan.cp,
            plan.ring if has_ring else "",
            plan.ulysses,
            plan.sequence_parallel and plan.tp > 1,
            plan.precision,
        )


@dataclass(frozen=True)
class SegmentRecord:
    """Seconds of one segment by samples of a microbatch, with the collectives inside it.

    second_half  None unless backwards were divided; `backward` is the first half then
    """

    signature: str
    cut: Cut
    forward: Curve
    backward: Curve
    second_half: Curve | None = None
    collectives: tuple[Collective, ...] = ()


class CollectiveRecord(NamedTuple):
    """Seconds of a collective of the data axis, by bytes of the whole tensor."""

    change: Change
    ranks_per_host: int
    hosts: int
    shares_memory: bool
    curve: Curve


class ExchangeRecord(NamedTuple):
    """Seconds of what groups of so many ranks exchange inside a forward or backward.

    all_reduce  of tensor ranks, by bytes of the tensor
    hop         of a ring, by bytes of a block
    """

    size: int
    all_reduce: Curve
    hop: Curve


@dataclass(frozen=True)
class OperationRates:
    """What operations take that were not measured in their model.

    products    seconds by floating-point operations of one product of square matrices
    thin        of a product with a large weight, by rows of the input: seconds for each element of the weight
    outer       the same of the gradient of such a weight
    attention   seconds by floating-point operations
    convolution the same
    pointwise   seconds by bytes read and written, with the memory of the result
    passes      the same of a copy to memory that is there
    """

    products: Curve
    thin: Curve
    outer: Curve
    attention: Curve
    convolution: Curve
    pointwise: Curve
    passes: Curve


@dataclass(frozen=True)
class Calibration:
    """What was measured of one machine.

    load      the load average before it began
    is_forced whether it was measured although other processes were at work
    updates   by optimizer: seconds by bytes of weights, gradients and states
    codecs    by codec: seconds by elements of a bucket
    edge      seconds by bytes of a message between stages on one host; None where they are on several
    forward_factor, backward_factor  seconds that segments took over those that their operations add up to
    """

    machine: MachineIdentity
    load: float
    is_forced: bool
    segments: tuple[SegmentRecord, ...]
    collectives: tuple[CollectiveRecord, ...]
    updates: Mapping[str, Curve]
    codecs: Mapping[str, Curve]
    exchanges: tuple[ExchangeRecord, ...]
    edge: Curve | None
    edge_between_hosts: Curve | None
    operations: OperationRates
    forward_factor: float
    backward_factor: float
    slowdown: float
    between_actions: float
    around_step: float


@dataclass(frozen=True)
class _File:
    """What a file holds."""

    version: int
    calibration: Calibration


def signature(facts: SegmentFacts) -> str:
    """The same for segments that compute alike: their operations, whatever their names and collectives."""
    rows = [(each.kind.value, *(float(f"{value:.5g}") for value in each[1:])) for each in facts.operations]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


# ---- the file -------------------------------------------------------------------------------------------


def encode_calibration(calibration: Calibration) -> bytes:
    """The calibration as the bytes of a file."""
    return msgspec.json.format(msgspec.json.encode(_File(CALIBRATION_VERSION, calibration)), indent=1) + b"\n"


def decode_calibration(data: bytes, *, where: str) -> Calibration:
    """Read what `encode_calibration` has written. Raises CalibrationError with all that is wrong."""
    need, attempt = f"version {CALIBRATION_VERSION} of `fourfold plan calibrate`", "fourfold plan calibrate"
    try:
        version = from_json(data, dict[str, msgspec.Raw]).get("version")
        if version is None or from_json(bytes(version)) != CALIBRATION_VERSION:
            got = "no version" if version is None else f"version {bytes(version).decode()[:20]}"
            raise CalibrationError(Problem(got, need, attempt), where=where)
        calibration = from_json(data, _File).calibration
    except DecodeError as error:
        raise CalibrationError(Problem(f"no calibration ({error})", need, attempt), where=where) from None
    if problems := list(_number_problems(calibration)):
        raise CalibrationError(problems, where=where)
    return calibration


def _curves(calibration: Calibration) -> Iterator[tuple[str, Curve]]:
    """All curves, and what to call them."""
    for segment in calibration.segments:
        yield "the forward of a segment", segment.forward
        yield "the backward of a segment", segment.backward
        if segment.second_half is not None:
            yield "the second half of a segment's backward", segment.second_half
    for each in calibration.collectives:
        yield each.change, each.curve
    yield from ((f"the update of {name}", curve) for name, curve in calibration.updates.items())
    yield from ((f"codec {name}", curve) for name, curve in calibration.codecs.items())
    yield from zip(OperationRates.__dataclass_fields__, vars(calibration.operations).values(), strict=True)
    for exchange in calibration.exchanges:
        yield "the all-reduce of tensor ranks", exchange.all_reduce
        yield "a hop of a ring", exchange.hop
    edges = {"messages between stages": calibration.edge, "messages between hosts": calibration.edge_between_hosts}
    yield from ((name, curve) for name, curve in edges.items() if curve is not None)


def _number_problems(calibration: Calibration) -> Iterator[Problem]:
    """Numbers that no measurement gives."""
    attempt = "fourfold plan calibrate"
    for name, (sizes, seconds) in _curves(calibration):
        if not sizes or len(sizes) != len(seconds):
            yield Problem(f"{name}: {len(sizes)} sizes, {len(seconds)} times", "a time for each size", attempt)
        elif any(not 0 <= a < b < math.inf for a, b in zip((0.0, *sizes), sizes, strict=False)):
            yield Problem(f"{name}: sizes {sizes}", "sizes above 0, in order", attempt)
        elif any(not 0 <= a <= b < math.inf for a, b in zip((0.0, *seconds), seconds, strict=False)):
            yield Problem(f"{name}: seconds {seconds}", "times of at least 0 that never fall", attempt)
    lowest = {"slowdown": 1.0, "between_actions": 0.0, "around_step": 0.0, "load": 0.0}
    lowest |= {"forward_factor": 0.0, "backward_factor": 0.0}
    for name, bound in lowest.items():
        value = getattr(calibration, name)
        if not bound <= value < math.inf:
            yield Problem(f"{name} = {value}", f"at least {bound:g}", attempt)


def task_key(source: FactsSource) -> str:
    """The same for tasks whose models compute alike, with one kind of optimizer: one calibration serves them all."""
    signatures = [signature(segment) for segment in source.facts(Plan()).segments]
    return " ".join([*signatures, source.update_spec.optimizer])


def calibration_path(machine: MachineIdentity, task: str) -> Path:
    """Where the calibration of a machine and a task is stored: in the user's cache folder. `task`: its `task_key`."""
    return _calibrations() / f"{_digest(task)}-{_digest(repr(tuple(machine)))}.json"


def has_calibrations(machine: MachineIdentity) -> bool:
    """Whether a machine has been measured, for any task."""
    return any(_calibrations().glob(f"*-{_digest(repr(tuple(machine)))}.json"))


def _calibrations() -> Path:
    folder = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache"
    # What another version of the file would have is measured again.
    return Path(folder) / "fourfold" / f"calibrations-{CALIBRATION_VERSION}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def other_conditions(machine: MachineIdentity, task: str) -> list[str]:
    """How the newest calibration of this task was measured, where that was not under these conditions: "torch 2.12.0".

    Empty without another calibration. Files that cannot be read are none.
    """
    path = calibration_path(machine, task)
    found = [each for each in path.parent.glob(f"{_digest(task)}-*.json") if each != path]
    for each in sorted(found, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            was = decode_calibration(read_bounded(each), where=str(each)).machine
        except (OSError, DecodeError, CalibrationError):
            continue
        pairs = zip(MachineIdentity._fields, was, machine, strict=True)
        return [f"{name.replace('_', ' ')} {there}" for name, there, here in pairs if there != here]
    return []


def check_writable(path: Path) -> None:
    """Raises OSError where no calibration could be written to this path: to be asked before one is measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, encode_calibration(calibration))


def read_calibration(path: Path, machine: MachineIdentity) -> Calibration:
    """The calibration in a file. Raises OSError, and CalibrationError if it is of another machine or damaged."""
    try:
        data = read_bounded(path)
    except DecodeError as error:
        raise CalibrationError(Problem(f"a file with {error}", "a calibration"), where=str(path)) from None
    calibration = decode_calibration(data, where=str(path))
    check_machine(calibration, machine, where=str(path))
    return calibration


def check_machine(calibration: Calibration, machine: MachineIdentity, *, where: str) -> None:
    """Raise CalibrationError with every way in which a calibration is of another machine."""
    attempt = "fourfold plan calibrate, on this machine"
    problems = [
        Problem(f"measured with {name.replace('_', ' ')} {was}", f"{name.replace('_', ' ')} {now}", attempt)
        for name, was, now in zip(MachineIdentity._fields, calibration.machine, machine, strict=True)
        if was != now
    ]
    if problems:
        raise CalibrationError(problems, where=where)
