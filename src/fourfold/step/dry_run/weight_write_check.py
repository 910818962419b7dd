"""Weight write check: whether forwards of a dry run write trained weights in a way that changes the training.

read-only  weights that forward may not write at all: a write would be lost, or several ranks would make it
untracked  a write without a torch function: it cannot be undone
Law: writes that pass this check are still compared between samples and numbers of forwards (`forward_comparison.py`).
"""

import json
from collections.abc import Collection
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.step.dry_run.state_problems import EDIT_ADVICE, describe_trained
from fourfold.step.dry_run.weight_write_tracker import WeightWriteTracker, fingerprint_params
from fourfold.step.weights import Weights
from fourfold.words.errors import Problem

DIFFERING_BUFFERS = {"local": "buffers may then differ between ranks, but trained weights may not"}
"""By the plan's `batch_norm`."""


class ReadOnlyReason(NamedTuple):
    """Why forward may not write weights: the plan's setting, what happens to a write, and a setting to try."""

    setting: str
    reason: str
    attempt: str


class WeightWriteCheck:
    """Checks the weights of one rank."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self._weights = weights
        self.read_only_reason = _find_read_only_reason(plan, weights)
        # On one device, rows are shortened before they are used, for any number of microbatches.
        self.counts_renorms = plan.reduce_group_size > 1 or self.read_only_reason is not None
        """Whether a lookup in an embedding that shortens rows (`max_norm`) counts as a write."""
        self.reset()

    @property
    def trained_names(self) -> Collection[str]:
        return self._weights.trainable

    @property
    def not_restored(self) -> Collection[str]:
        """The weights that need no restoring after a forward, because a forward that writes them is refused."""
        return self.trained_names if self.read_only_reason is not None else ()

    def reset(self) -> None:
        """Begin a dry run."""
        self._written, self._replaced, self._untracked = set[str](), set[str](), set[str]()
        self._fingerprints_before = self._fingerprints()

    def _fingerprints(self) -> dict[str, int]:
        return fingerprint_params(self._weights.storage.whole_params)

    def observe(self, writes: WeightWriteTracker) -> None:
        """Record what a forward wrote, before it is undone."""
        if self.read_only_reason is not None:
            self._written |= writes.written
        self._replaced |= set(writes.replaced_storage())
        self._untracked |= set(writes.untracked_writes())

    def problems(self) -> list[Problem]:
        """What is wrong, after the dry run has restored all it can."""
        after, problems = self._fingerprints(), []
        changed = {name for name, value in after.items() if value != self._fingerprints_before[name]}
        if (names := self._sorted_names(self._written)) and self.read_only_reason is not None:
            setting, reason, attempt = self.read_only_reason
            got = f"forward writes {describe_trained(names)}, with {setting}"
            need = f"trained weights that only the optimizer writes: {reason}"
            problems.append(Problem(got, need, f"{attempt}, or {EDIT_ADVICE}"))
        if names := self._sorted_names(self._replaced - self._written):
            got = f"forward moves {describe_trained(names)} to another storage"
            attempt = "p.copy_(…), or another in-place function (its name ends in _)"
            problems.append(Problem(got, "weights that are changed in place", attempt))
        if names := self._sorted_names((self._untracked | changed) - self._replaced - self._written):
            got = f"forward writes {describe_trained(names)} without a torch function, such as through numpy"
            problems.append(Problem(got, "writes by torch functions, which can be observed", EDIT_ADVICE))
        return problems

    def _sorted_names(self, names: Collection[str]) -> list[str]:
        return [name for name in self.trained_names if name in names]


def _find_read_only_reason(plan: Plan, weights: Weights) -> ReadOnlyReason | None:
    """The first of the plan's settings, other than by default, that has a reason against writes in forward."""
    in_masters = weights.master_weights.forward_loss_reason
    is_computed_in_parts = plan.reduce_group_size * plan.microbatches > 1
    reasons = {
        "zero": weights.storage.forward_loss_reason,
        "precision": in_masters,
        "offload": in_masters,
        "batch_norm": DIFFERING_BUFFERS.get(plan.batch_norm, "") if is_computed_in_parts else "",
    }
    for field, reason in reasons.items():
        value, default = getattr(plan, field), getattr(Plan(), field)
        if reason and value != default:
            return ReadOnlyReason(f"{field} = {json.dumps(value)}", reason, f"{field} = {json.dumps(default)}")
    return None
