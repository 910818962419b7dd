"""Weight write check: whether forwards of a dry run write trained weights in a way that changes the training.

read-only  weights that forward may not write at all: a write would be lost, or several ranks would make it
untracked  a write without a torch function: it cannot be undone
Law: writes that pass this check are still compared between samples and numbers of forwards (`forward_comparison.py`).
"""

from collections.abc import Collection, Mapping

from torch import nn

from fourfold.model.weights import Weights
from fourfold.plan.check import ReadOnlyReason
from fourfold.proof.state_problems import EDIT_ADVICE, describe_trained
from fourfold.proof.weight_write_tracker import WeightWriteTracker, fingerprint_params
from fourfold.words.errors import Problem


class WeightWriteCheck:
    """Checks the weights of one rank."""

    def __init__(self, weights: Weights, read_only_reason: ReadOnlyReason | None, *, num_ranks: int) -> None:
        """`num_ranks` ranks have different parts of a batch."""
        self._weights, self.read_only_reason = weights, read_only_reason
        # On one device, rows are shortened before they are used, for any number of microbatches.
        self.counts_renorms = num_ranks > 1 or read_only_reason is not None
        """Whether a lookup in an embedding that shortens rows (`max_norm`) counts as a write."""
        self.reset()

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters that this rank has, by name."""
        return self._weights.trainable

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
