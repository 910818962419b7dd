"""Replica drift: whether ranks that hold the same weights still have the same bits.

replica  a weight that several ranks hold: every weight at zero 0, one shard in hybrid sharding, every frozen weight
held     in this rank's own memory; weights that exist once per host are held by the host's first rank
Law: replicas that differ in one bit are found at the next check, and every rank names the first such parameter. Between
machines or kinds of update that may round differently this is a warning, with the size of the difference.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.fingerprint import fingerprints
from fourfold.plan.intervals import is_due
from fourfold.step.drift_report import (
    FROZEN,
    KINDS,
    WEIGHTS,
    Difference,
    describe_difference,
    first_difference,
    is_rounding,
    machine_fingerprint,
)
from fourfold.words.errors import DivergenceError, Problem, SettingError

TRAIN_STEP_HINT = "the same seeds, hooks and edits on every rank; weights changed by hand inside step.edit()"


class ReplicatedTensor(NamedTuple):
    """A weight that this rank holds: elements [start, start + numel) of a flattened parameter.

    shard  which shard of a parameter that the tensor axis splits; 0 of one that all tensor ranks hold
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

    @property
    def group(self) -> tuple[str, bool]:
        """What is compared together: a rank may hold the same as others of one group, and not of another."""
        return self.kind, self.shard > 0


class DriftChecker:
    """Compares the weights of the ranks after every `every` steps; 0: never."""

    def __init__(
        self, communicator: Communicator, every: int, *, kinds: Sequence[str] = KINDS, attempt: str = TRAIN_STEP_HINT
    ) -> None:
        """`kinds`: of weights that are compared. `attempt`: what the error suggests."""
        if every < 0:
            raise SettingError(Problem(f"drift_check = {every}", "a number of steps, or 0 for never"))
        self.every = every if communicator.size > 1 else 0
        self._communicator, self._warned_size, self._attempt = communicator, 0.0, attempt
        self._kinds = kinds
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
        tensors = [each for each in tensors if each.kind in self._kinds]
        with untracked_access():
            hashes = fingerprints([each.tensor for each in tensors])
        groups = [(kind, is_split) for kind in KINDS for is_split in (False, True)]
        digests = [_digests(tensors, hashes, group) for group in groups]
        if not _any_differ(self._communicator.all_gather_json(digests)):
            return
        by_rank = self._communicator.all_gather_json(
            [[each.key, value] for each, value in zip(tensors, hashes, strict=True)]
        )
        difference = first_difference(by_rank)
        assert difference is not None, "digests differ, fingerprints do not"
        size, largest = self._max_difference(tensors, difference)
        machines = self._communicator.all_gather_json(
            ", ".join(filter(None, [machine_fingerprint(self._communicator), update_kind]))
        )
        text = describe_difference(difference, size, largest)
        if is_rounding(difference, machines):
            self._warn(text, size, machines, when)
            return
        need = "the same bits on every rank that holds a weight"
        raise DivergenceError(Problem(text, need, self._attempt), where=f"the weights {when}")

    def _max_difference(self, tensors: Sequence[ReplicatedTensor], difference: Difference) -> tuple[float, float]:
        """The largest difference between replicas of a parameter, and its largest weight. Collective."""
        local = next((each.tensor for each in tensors if each.key == list(difference.key)), None)
        source = difference.rank_groups[0][0]
        if self._communicator.rank == source and local is not None:
            reference = local.detach().reshape(-1).to(self._communicator.device, copy=True)
        else:
            _, _, _, numel, dtype, _ = difference.key
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


def replicated_tensors(model: nn.Module) -> Iterator[ReplicatedTensor]:
    """The replicas that a rank holds of a model whose weights are all in its own memory."""
    for name, parameter in model.named_parameters():
        yield ReplicatedTensor(WEIGHTS if parameter.requires_grad else FROZEN, name, 0, parameter)


def _digests(tensors: Sequence[ReplicatedTensor], hashes: Sequence[int], group: tuple[str, bool]) -> list[str]:
    """Two digests of the weights of one group that this rank holds: of their keys, and of their values."""
    rows = [(each.key, value) for each, value in zip(tensors, hashes, strict=True) if each.group == group]
    parts = [key for key, _ in rows], [value for _, value in rows]
    return [hashlib.blake2b(json.dumps(part).encode(), digest_size=8).hexdigest() for part in parts]


def _any_differ(by_rank: Sequence[Sequence[Sequence[str]]]) -> bool:
    """Whether ranks that hold the same weights have different values."""
    for group in range(len(by_rank[0])):
        values_of_keys: dict[str, set[str]] = {}
        for row in by_rank:
            keys, values = row[group]
            values_of_keys.setdefault(keys, set()).add(values)
        if any(len(each) > 1 for each in values_of_keys.values()):
            return True
    return False


def _largest(numbers: Sequence[float]) -> float:
    return float("nan") if any(math.isnan(number) for number in numbers) else max(numbers)
