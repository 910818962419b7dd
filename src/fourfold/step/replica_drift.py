"""Drift: whether the ranks that hold the same weights still do.

replica  what several ranks hold alike: all weights at zero 0, one shard in hybrid sharding, all frozen weights
held     a tensor of weights in this rank's own memory; weights that exist once per host are held by its first rank
Law: replicas that differ in one bit are found at the next check, and every rank names the first parameter. Between
machines, or updates, that may round differently this is a warning, with the size of the difference.
"""

import hashlib
import json
import math
import platform
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.comm.transports import Communicator
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.fingerprint import fingerprints
from fourfold.plan.intervals import is_due
from fourfold.plan.plan import Plan
from fourfold.words.errors import DivergenceError, Problem, SettingError

TRAIN_STEP_HINT = "the same seeds, hooks and edits on every rank; weights changed by hand inside step.edit()"
WEIGHTS, MASTER_WEIGHTS, FROZEN = KINDS = ("weights", "master weights", "frozen weights")


class ReplicatedTensor(NamedTuple):
    """What this rank holds of a parameter: elements [start, start + n) of its flattened form."""

    kind: str
    name: str
    start: int
    tensor: Tensor

    @property
    def key(self) -> list[Any]:
        """What two replicas have in common, whatever their values."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return [self.kind, self.name, self.start, self.tensor.numel(), dtype]


class _Difference(NamedTuple):
    """The first parameter that differs, and the ranks by what they hold of it, the most first."""

    key: Sequence[Any]
    rank_groups: Sequence[Sequence[int]]
    num_more: int


class DriftChecker:
    """Compares the weights of the ranks, after every `every` steps; 0: never."""

    def __init__(self, communicator: Communicator, every: int, *, attempt: str = TRAIN_STEP_HINT) -> None:
        """`attempt`: what the error says to try."""
        if every < 0:
            raise SettingError(Problem(f"drift_check = {every}", "a number of steps, or 0 for never"))
        self.every = every if communicator.size > 1 else 0
        self._communicator, self._warned_size, self._attempt = communicator, 0.0, attempt
        self._has_compared = False

    def is_due(self, step: int, period: int) -> bool:
        """Whether to compare after this step: the first after which ranks have the same weights, and every so many.

        What differs from the start, such as a hook of one rank's own, is found before it has cost a run.
        """
        is_first = not self._has_compared and step % period == 0
        return self.every > 0 and (is_first or is_due(step, self.every, period))

    def compare(self, tensors: Sequence[ReplicatedTensor], when: str, *, update_kind: str = "") -> None:
        """Raise DivergenceError, on every rank, where replicas differ. Collective: one exchange where they do not.

        Where the ranks that differ are of unlike machines, or update in another manner, rank 0 warns instead.
        """
        self._has_compared = True
        with untracked_access():
            found = fingerprints([each.tensor for each in tensors])
        rows = [_digests(tensors, found, kind) for kind in KINDS]
        if not _any_differ(self._communicator.all_gather_json(rows)):
            return
        everyone = self._communicator.all_gather_json(
            [[each.key, number] for each, number in zip(tensors, found, strict=True)]
        )
        difference = _first_difference(everyone)
        assert difference is not None, "digests differ, fingerprints do not"
        size, largest = self._max_difference(tensors, difference)
        machines = self._communicator.all_gather_json(
            ", ".join(filter(None, [machine_fingerprint(self._communicator), update_kind]))
        )
        text = _describe(difference, size, largest)
        if _is_rounding(difference, machines):
            self._warn(text, size, machines, when)
            return
        need = "the same bits on every rank that holds a weight"
        raise DivergenceError(Problem(text, need, self._attempt), where=f"the weights {when}")

    def _max_difference(self, held: Sequence[ReplicatedTensor], difference: _Difference) -> tuple[float, float]:
        """The largest difference between replicas of a parameter, and its largest weight. Collective."""
        mine = next((each.tensor for each in held if each.key == list(difference.key)), None)
        source = difference.rank_groups[0][0]
        if self._communicator.rank == source and mine is not None:
            other = mine.detach().reshape(-1).to(self._communicator.device, copy=True)
        else:
            _, _, _, numel, dtype = difference.key
            other = torch.zeros(numel, dtype=getattr(torch, dtype), device=self._communicator.device)
        self._communicator.broadcast(other, source)
        found = [0.0, 0.0]
        if mine is not None:
            wide = torch.complex128 if mine.is_complex() else torch.float64  # frozen weights may be of small integers
            own, other = mine.detach().reshape(-1).to(other.device, wide), other.to(wide)
            found = [(own - other).abs().max().item(), own.abs().max().item()]
        told = self._communicator.all_gather_json([str(number) for number in found])  # texts: NaN is no JSON
        sizes, weights = ([float(row[column]) for row in told] for column in range(2))
        return _largest(sizes), _largest(weights)

    def _warn(self, text: str, size: float, machines: Sequence[str], when: str) -> None:
        if size < 10 * self._warned_size:
            return
        self._warned_size = size
        if self._communicator.rank == 0:
            kinds = " / ".join(sorted(set(machines)))
            then = "told again when it has grown tenfold"
            warnings.warn(
                f"weights differ {when}: {text}. These ranks may round differently ({kinds}); {then}",
                RuntimeWarning,
                stacklevel=2,
            )


def replicated_tensors(model: nn.Module, plan: Plan) -> Iterator[ReplicatedTensor]:
    """What a rank holds of a model whose weights are all in its own memory."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield ReplicatedTensor(WEIGHTS, name, 0, parameter)
        elif compares_frozen(plan):
            yield ReplicatedTensor(FROZEN, name, 0, parameter)


def compares_frozen(plan: Plan) -> bool:
    """Whether ranks have the same frozen weights: a forward may keep its state there, which may be each rank's own."""
    return plan.batch_norm != "local"


def machine_fingerprint(communicator: Communicator) -> str:
    """What decides how this rank's updates round: ranks for which it is the same give the same bits."""
    if communicator.device.type == "cuda":
        return f"{torch.cuda.get_device_name(communicator.device)}, torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor_name()}, {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _digests(held: Sequence[ReplicatedTensor], found: Sequence[int], kind: str) -> list[str]:
    """Of one kind: which places this rank holds, and what it has there."""
    mine = [(each.key, number) for each, number in zip(held, found, strict=True) if each.kind == kind]
    parts = [place for place, _ in mine], [number for _, number in mine]
    return [hashlib.blake2b(json.dumps(part).encode(), digest_size=8).hexdigest() for part in parts]


def _any_differ(everyone: Sequence[Sequence[Sequence[str]]]) -> bool:
    """Whether ranks that hold the same places have something else there."""
    for kind in range(len(KINDS)):
        values: dict[str, set[str]] = {}
        for row in everyone:
            places, found = row[kind]
            values.setdefault(places, set()).add(found)
        if any(len(each) > 1 for each in values.values()):
            return True
    return False


def _first_difference(everyone: Sequence[Sequence[Any]]) -> _Difference | None:
    """The first difference, in the order in which the first rank that holds it has its parameters."""
    by_place: dict[str, dict[int, list[int]]] = {}
    for rank, row in enumerate(everyone):
        for place, number in row:
            by_place.setdefault(json.dumps(place), {}).setdefault(number, []).append(rank)
    differing = [(place, ranks) for place, ranks in by_place.items() if len(ranks) > 1]
    if not differing:
        return None
    place, ranks = differing[0]
    # The most first: they are most likely right.
    groups = sorted(ranks.values(), key=lambda some: (-len(some), some))
    return _Difference(json.loads(place), groups, len(differing) - 1)


def _describe(difference: _Difference, size: float, largest: float) -> str:
    kind, name = difference.key[:2]
    which = name if kind == WEIGHTS else f"{name} ({kind})"
    reference, *others = difference.rank_groups
    differ = "; ".join(f"{_rank_list(ranks, 'differs', 'differ')} from {_rank_list(reference)}" for ranks in others)
    more = f"; so do {difference.num_more} more" if difference.num_more else ""
    return f"{which}: {differ} by at most {size:.3g}, where weights reach {largest:.3g}{more}"


def _rank_list(ranks: Sequence[int], one: str = "", many: str = "") -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}".rstrip()
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} {many}".rstrip()


def _is_rounding(difference: _Difference, machines: Sequence[str]) -> bool:
    """Whether no two ranks of one kind of machine differ."""
    groups: dict[str, set[int]] = {}
    for number, ranks in enumerate(difference.rank_groups):
        for rank in ranks:
            groups.setdefault(machines[rank], set()).add(number)
    return all(len(each) == 1 for each in groups.values())


def _largest(numbers: Sequence[float]) -> float:
    return float("nan") if any(math.isnan(number) for number in numbers) else max(numbers)
