"""Weights: whether ranks that hold the same weights still have the same bits.

replica  a weight that several ranks hold: every weight at zero 0, one shard in hybrid sharding, every frozen weight
held     in this rank's own memory; weights that exist once per host are held by the host's first rank
Law: replicas that differ in one bit are found at the next check, and every rank names the first such parameter. Between
machines or kinds of update that may round differently this is a warning, with the size of the difference.
"""

import json
import math
import platform
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.comm.communicator import Communicator
from fourfold.plan.intervals import is_due
from fourfold.proof.digests.table import TABLE, digest
from fourfold.torch_kit.fingerprint import fingerprints
from fourfold.torch_kit.param_access import untracked_access
from fourfold.words.errors import Problem, SettingError
from fourfold.words.rank_groups import format_ranks

WEIGHTS, MASTER_WEIGHTS, FROZEN, BUFFERS = KINDS = ("weights", "master weights", "frozen weights", "buffers")


class ReplicatedTensor(NamedTuple):
    """A weight that this rank holds: elements [start, start + numel) of a flattened parameter.

    shard  which shard of a parameter that the tensor axis splits; 0 of one that all tensor ranks hold. Of a buffer: the
           place on cp and tp, since its values may be those of the place
    """

    kind: str
    name: str
    start: int
    tensor: Tensor
    shard: int = 0

    @property
    def key(self) -> list[Any]:
        """The same for all replicas of a weight, whatever their values."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return [self.kind, self.name, self.start, self.tensor.numel(), dtype, self.shard]


def replicated_tensors(model: nn.Module) -> Iterator[ReplicatedTensor]:
    """The replicas that a rank holds of a model whose weights are all in its own memory."""
    for name, parameter in model.named_parameters():
        yield ReplicatedTensor(WEIGHTS if parameter.requires_grad else FROZEN, name, 0, parameter)


class DriftChecker:
    """Compares the weights of the ranks after every `every` steps; 0: never."""

    def __init__(
        self,
        communicator: Communicator,
        every: int,
        *,
        with_frozen: bool = True,
        attempt: str = TABLE["weights"].attempt,
    ) -> None:
        """`with_frozen`: compare frozen weights and buffers too, which with local batch norm may be a rank's own.

        `attempt`: what the error suggests.
        """
        if every < 0:
            raise SettingError(Problem(f"drift_check = {every}", "a number of steps, or 0 for never"))
        self.every = every if communicator.size > 1 else 0
        self._communicator, self._warned_size, self._attempt = communicator, 0.0, attempt
        self._kinds = KINDS if with_frozen else (WEIGHTS, MASTER_WEIGHTS)
        self._is_first_due = self.every > 0

    def is_due(self, step: int, period: int) -> bool:
        """Whether to compare after this step. Ranks have the same weights after every `period` steps.

        The first such step is always compared: a difference from the start, such as a hook on one rank only, must not
        cost a run.
        """
        return (self._is_first_due and step % period == 0) or is_due(step, self.every, period)

    def compare(self, tensors: Iterable[ReplicatedTensor], when: str, *, update_kind: str = "") -> None:
        """Raise DivergenceError, on every rank, if replicas differ. Collective: one all-gather if they do not.

        If the ranks that differ have different machines, or another `update_kind`, rank 0 warns instead.
        """
        self._is_first_due = False
        gather = self._communicator.all_gather_json
        tensors = [each for each in tensors if each.kind in self._kinds]
        with untracked_access():
            hashes = fingerprints([each.tensor for each in tensors])
        # What is compared together: a rank may hold the same as others of one group, and not of another.
        groups: dict[tuple[str, bool], list[Any]] = {(kind, split): [] for kind in KINDS for split in (False, True)}
        rows = [[each.key, value] for each, value in zip(tensors, hashes, strict=True)]
        for each, row in zip(tensors, rows, strict=True):
            groups[each.kind, each.shard > 0].append(row)
        digests = gather([[digest([key for key, _ in group]), digest(group)] for group in groups.values()])
        # Ranks that hold the same of a group, by the digest of its keys, have one digest of its values.
        if all(len(set(map(tuple, column))) == len(dict(column)) for column in zip(*digests, strict=True)):
            return
        difference = _first_difference(gather(rows))
        size, largest = self._max_difference(tensors, difference)
        machines = gather(", ".join(filter(None, [_machine(self._communicator), update_kind])))
        text = difference.describe(size, largest)
        if difference.is_rounding(machines):
            self._warn(text, size, machines, when)
            return
        row = TABLE["weights"]
        raise row.error(Problem(text, row.need, self._attempt), where=f"{row.where} {when}")

    def _max_difference(self, tensors: Sequence[ReplicatedTensor], difference: "_Difference") -> tuple[float, float]:
        """The largest difference between replicas of a parameter, and its largest weight. Collective."""
        key, source = difference.key, difference.rank_groups[0][0]
        local = next((each.tensor for each in tensors if each.key == key), None)
        if self._communicator.rank == source and local is not None:
            reference = local.detach().reshape(-1).to(self._communicator.device, copy=True)
        else:
            _, _, _, numel, dtype, _ = key
            reference = torch.zeros(numel, dtype=getattr(torch, dtype), device=self._communicator.device)
        self._communicator.broadcast(reference, source)
        sizes = [0.0, 0.0]
        if local is not None:
            wide = torch.complex128 if local.is_complex() else torch.float64  # frozen weights may be small integers
            local, reference = local.detach().reshape(-1).to(reference.device, wide), reference.to(wide)
            sizes = [(local - reference).abs().max().item(), local.abs().max().item()]
        by_rank = self._communicator.all_gather_json([str(size) for size in sizes])  # strings: JSON has no NaN
        differences, weights = ([float(row[column]) for row in by_rank] for column in range(2))
        return _largest(differences), _largest(weights)

    def _warn(self, text: str, size: float, machines: Sequence[str], when: str) -> None:
        if size < 10 * self._warned_size:
            return
        self._warned_size = size
        if self._communicator.rank == 0:
            kinds = " / ".join(sorted(set(machines)))
            then = "the next warning comes when the difference has grown tenfold"
            warnings.warn(
                f"weights differ {when}: {text}. These ranks may round differently ({kinds}); {then}",
                RuntimeWarning,
                stacklevel=2,
            )


class DriftSchedule:
    """When the weights of a wrapped optimizer are compared, asked in every backward.

    After the first step, after the first step that uses loaded state, and after every `every` steps; 0: never. The
    first step is compared because what is wrong from the start, such as noise that each rank draws for itself, must not
    cost a run.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._first: float = 1 if every else math.inf
        """How many steps after the build, or after a load of state, weights are compared."""
        self._last_step, self._next_step = 0, self._first
        self.num_loads = 0
        """How many loads of optimizer state have been seen."""

    def is_due(self, num_steps: int, num_loads: int) -> bool:
        """Whether to compare now, after so many steps and loads; True only once for each step."""
        if self.num_loads != num_loads:
            self.num_loads, self._next_step = num_loads, num_steps + self._first
        is_wanted = num_steps >= self._next_step or is_due(num_steps, self._every, 1)
        if not is_wanted or num_steps <= self._last_step:
            return False
        self._last_step, self._next_step = num_steps, math.inf
        return True


class _Difference(NamedTuple):
    """The first weight that differs, and the ranks of each of its values, the most first: they are most likely right.

    num_more  how many other weights differ
    """

    key: list[Any]
    rank_groups: Sequence[Sequence[int]]
    num_more: int

    def describe(self, size: float, largest: float) -> str:
        kind, name = self.key[:2]
        which = name if kind == WEIGHTS else f"{name} ({kind})"
        reference, *others = self.rank_groups
        differ = "; ".join(f"{format_ranks(r, 'differs', 'differ')} from {format_ranks(reference)}" for r in others)
        more = f"; so do {self.num_more} more" if self.num_more else ""
        return f"{which}: {differ} by at most {size:.3g}, where weights reach {largest:.3g}{more}"

    def is_rounding(self, machines: Sequence[str]) -> bool:
        """Whether ranks on the same kind of machine agree: then different rounding explains the difference."""
        groups: dict[str, set[int]] = {}
        for index, ranks in enumerate(self.rank_groups):
            for rank in ranks:
                groups.setdefault(machines[rank], set()).add(index)
        return all(len(each) == 1 for each in groups.values())


def _first_difference(by_rank: Sequence[Sequence[Any]]) -> _Difference:
    """The first difference, in the parameter order of the first rank that holds it."""
    ranks_by_value: dict[str, dict[int, list[int]]] = {}
    for rank, row in enumerate(by_rank):
        for key, value in row:
            ranks_by_value.setdefault(json.dumps(key), {}).setdefault(value, []).append(rank)
    differing = [(key, groups) for key, groups in ranks_by_value.items() if len(groups) > 1]
    assert differing, "digests differ, fingerprints do not"
    key, groups = differing[0]
    rank_groups = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    return _Difference(json.loads(key), rank_groups, len(differing) - 1)


def _machine(communicator: Communicator) -> str:
    """What decides how this rank's updates round: ranks on the same kind of machine compute the same bits."""
    if communicator.device.type == "cuda":
        return torch.cuda.get_device_name(communicator.device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _largest(numbers: Sequence[float]) -> float:
    return float("nan") if any(math.isnan(number) for number in numbers) else max(numbers)
