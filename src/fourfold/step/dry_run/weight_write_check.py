"""Weight watch: whether the forwards of a dry run write trained weights in a way that would be another training.

fixed   weights that forward may not write at all: a write would be lost, or done by several ranks
unseen  a write by other means than torch's functions: it cannot be put back
Law: what the watch does not refuse, `forward_state` judges by what other samples, and other numbers of forwards, leave.
"""

from collections.abc import Collection
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.step.dry_run.forward_state import EDIT_ADVICE, describe_trained
from fourfold.step.dry_run.weight_write_tracker import WeightWriteTracker, fingerprint_params
from fourfold.step.weights import Weights
from fourfold.words.errors import Problem


class ReadOnlyReason(NamedTuple):
    """Why forward may not write weights: the setting of the plan, what happens to the write, and another setting."""

    setting: str
    reason: str
    attempt: str


class WeightWriteCheck:
    """Watches the weights of one rank."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self._weights = weights
        self.read_only_reason = _find_read_only_reason(plan, weights)
        # On one device rows are shortened before they are used, however many microbatches there are.
        self.counts_renorms = plan.reduce_group_size > 1 or self.read_only_reason is not None
        """Whether a lookup in an embedding that shortens rows counts as a write."""
        self.reset()

    @property
    def trained_names(self) -> Collection[str]:
        return self._weights.trainable

    @property
    def not_restored(self) -> Collection[str]:
        """The weights that need not be put back after a forward: where it writes them it is refused."""
        return self.trained_names if self.read_only_reason is not None else ()

    def reset(self) -> None:
        """Begin a dry run."""
        self._written, self._replaced, self._untracked = set[str](), set[str](), set[str]()
        self._fingerprints_before = self._fingerprints()

    def _fingerprints(self) -> dict[str, int]:
        # Weights that rest split are placeholders between uses.
        return {} if self._weights.sharded_params is not None else fingerprint_params(self._weights.trainable)

    def observe(self, writes: WeightWriteTracker) -> None:
        """After a forward, before what it wrote is put back."""
        if self.read_only_reason is not None:
            self._written |= writes.written
        self._replaced |= set(writes.replaced_storage())
        self._untracked |= set(writes.untracked_writes())

    def problems(self) -> list[Problem]:
        """After a dry run, and when all that can be put back is put back."""
        after, problems = self._fingerprints(), []
        changed = {name for name, value in after.items() if value != self._fingerprints_before[name]}
        if (names := self._sorted_names(self._written)) and self.read_only_reason is not None:
            setting, why, attempt = self.read_only_reason
            got = f"forward writes {describe_trained(names)}, with {setting}"
            need = f"weights that only the update writes: {why}"
            problems.append(Problem(got, need, f"{attempt}, or {EDIT_ADVICE}"))
        if names := self._sorted_names(self._replaced - self._written):
            need = "weights that are changed in place"
            attempt = "p.copy_(…), or another function that ends in _"
            problems.append(Problem(f"forward gives {describe_trained(names)}, another storage", need, attempt))
        if names := self._sorted_names((self._untracked | changed) - self._replaced - self._written):
            got = f"forward writes {describe_trained(names)}, by other means than torch's functions"
            problems.append(Problem(got, "writes that can be watched, or none", EDIT_ADVICE))
        return problems

    def _sorted_names(self, names: Collection[str]) -> list[str]:
        return [name for name in self.trained_names if name in names]


def _find_read_only_reason(plan: Plan, weights: Weights) -> ReadOnlyReason | None:
    if weights.sharded_params is not None:
        why = "they are gathered for each use, and what is written into them is lost"
        return ReadOnlyReason(f"zero = {plan.zero}", why, "zero = 0")
    if weights.is_host_shared:
        return ReadOnlyReason(
            f"zero = {plan.zero}", "the ranks of a host share one copy, and each would write it", "zero = 0"
        )
    if weights.master_weights.param_names:
        why = "the model has copies of what the update goes on from, rounded or not, and what is written there is lost"
        if plan.precision != "keep":
            return ReadOnlyReason(f'precision = "{plan.precision}"', why, 'precision = "keep"')
        return ReadOnlyReason(f'offload = "{plan.offload}"', why, 'offload = "none"')
    if plan.batch_norm == "local" and plan.reduce_group_size * plan.microbatches > 1:
        why = "state may then differ from rank to rank, and weights may not"
        return ReadOnlyReason('batch_norm = "local"', why, 'batch_norm = "refuse"')
    return None
