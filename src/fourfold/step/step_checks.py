"""Step checks: what is compared and refused around a step, before a weight changes and after it.

Law: what the user has changed since the build, and a step would ignore, is reported before the step.
"""

from collections.abc import Iterable
from typing import Any

from fourfold.comm.reduce.divergence_report import with_options
from fourfold.model.batch_statistics import NormWatch
from fourfold.model.weights import Weights
from fourfold.orders.sample_order import BatchRange
from fourfold.plan.intervals import is_due
from fourfold.proof.digests.batches import DuplicateBatches, check_same_source, samples_digest
from fourfold.proof.digests.weights import DriftChecker, ReplicatedTensor
from fourfold.step.collective_calls import CollectiveCalls, with_samples
from fourfold.step.grad_strategies import LocalSteps
from fourfold.step.nan_guard import NanGuard, Skipped
from fourfold.step.optimizer_checks import OptimizerWatch
from fourfold.step.step_state import StepState
from fourfold.words.errors import OptimizerError, TaskError


class StepChecks:
    """The checks of one rank's steps."""

    def __init__(
        self,
        calls: CollectiveCalls,
        weights: Weights,
        local: LocalSteps,
        *,
        optimizer_watch: OptimizerWatch,
        norms: NormWatch,
        duplicate_batches: DuplicateBatches,
        drift_checker: DriftChecker,
        nan_guard: NanGuard,
    ) -> None:
        self._calls, self._weights, self._local = calls, weights, local
        self._optimizer_watch, self._norms = optimizer_watch, norms
        self._duplicate_batches, self._drift_checker, self._nan_guard = duplicate_batches, drift_checker, nan_guard
        self._num_calls = 0

    def before_step(self, batch: Any, *, compares_all: bool, has_pending_updates: bool) -> None:
        """Begin the call of a step, and raise if a step would ignore what has changed. Collective.

        `compares_all`: whether the ranks must have compared their calls before the step's first collective.
        """
        samples = getattr(batch, "samples", None)
        self.check_unchanged(has_pending_updates=has_pending_updates)
        norm_modes = self._norms.call_text(in_training=True)
        call = with_samples(f"step {self._calls.num_steps + 1}{norm_modes}", samples)
        self._calls.begin_step(with_options(call, self._optimizer_watch.options.text()))
        compares_batches = self._duplicate_batches.num_left > 0 and samples is None
        compares_sources = self._num_calls == 0 and samples is not None
        if compares_all or compares_batches or compares_sources or norm_modes:
            self._calls.check_same()  # before other collectives than sums
        if compares_sources:
            check_same_source(self._calls.world.all_gather_json(getattr(batch, "probe", None)))
        if compares_batches:
            self._compare_batches(batch)

    def before_evaluation(self, call: str, samples: BatchRange | None = None) -> None:
        """Begin the call of an evaluation; compare it first where its forward needs other ranks. Collective."""
        norm_modes = self._norms.call_text(in_training=False)
        self._calls.begin(f"{call}{norm_modes}", samples)
        if norm_modes:
            self._calls.check_same()

    def _compare_batches(self, batch: Any) -> None:
        """Raise TaskError, on every rank, where all data ranks train on the same batches. Collective."""
        by_rank = self._calls.world.all_gather_json(samples_digest(batch))
        self._duplicate_batches.compare(by_rank)

    def check_unchanged(self, *, has_pending_updates: bool) -> None:
        """Raise if the optimizer or the model has changed since the build in a way that a step would ignore."""
        call = f"step {self._calls.num_steps + 1}"
        if problems := self._optimizer_watch.problems():
            error = OptimizerError(problems, where="the optimizer")
            self._calls.raise_after_mismatch(f"{call}, which its optimizer cannot do", error)
        if problems := [*self._weights.guard.problems(), *self._norms.problems()]:
            self._calls.raise_after_mismatch(
                f"{call}, which its model cannot do", TaskError(problems, where="the model")
            )
        # In steps 0, 1, 2, 4, 8, … all weights are compared: a loop that writes weights is found early.
        is_early = self._num_calls & (self._num_calls - 1) == 0
        is_compared = is_due(self._calls.num_steps, self._drift_checker.every, self._local.interval)
        self.check_no_edits(call, compare_all=is_early or is_compared, sampled=not has_pending_updates)

    def check_no_edits(self, call: str, *, compare_all: bool = False, sampled: bool = True) -> None:
        """Raise TaskError if weights have been written outside of `edit`, and the next update would ignore it."""
        if self.is_synchronized:
            for edits in self._local.edits_at_sync:
                edits.accept_edits()
        if problems := self._weights.edits.problems(compare_all=compare_all, sampled=sampled):
            error = TaskError(problems, where="the model")
            self._calls.raise_after_mismatch(f"{call}, with weights that were written", error)

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same weights: always, or with local steps just after they are averaged."""
        return self._calls.num_steps % self._local.interval == 0

    def save_buffers(self) -> None:
        """Before a step: copy what a skipped step must restore."""
        self._nan_guard.policy.save_buffers()

    def after_step(self, step: StepState, samples: BatchRange | None) -> Skipped | None:
        """After a step, which is counted: None if it was good. Collective if it was bad. Raises TrainingError."""
        if step.has_called_hooks:
            self._weights.guard.check()  # a hook may have replaced the storage of parameters
        self._num_calls += 1
        self._calls.num_steps += 1
        return self._nan_guard.check(step, self._calls.num_steps, samples)

    @property
    def num_calls(self) -> int:
        """Steps done by this object."""
        return self._num_calls

    def compare_replicas_if_due(self, tensors: Iterable[ReplicatedTensor]) -> None:
        """After a step: `compare_replicas` if `drift_check` says so. `tensors` are read only then."""
        if self._drift_checker.is_due(self._calls.num_steps, self._local.interval):
            self.compare_replicas(tensors)

    def compare_replicas(self, tensors: Iterable[ReplicatedTensor]) -> None:
        """Raise DivergenceError, on every rank, if replicas of weights differ. Collective."""
        when = f"after step {self._calls.num_steps}"
        self._drift_checker.compare(tensors, when, update_kind=self._optimizer_watch.options.implementation())
