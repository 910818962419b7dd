"""Step checks: what is compared and refused around a step, before a weight changes and after it.

call      a collective call and its step, such as "evaluate() after step 6"
bad step  a step whose global loss, or gradient norm if one is measured, is not finite
Law: what the user has changed since the build, and a step would ignore, is reported before the step.
Law: ranks that are in different calls raise DivergenceError; none waits for the others forever.
Law: all ranks skip the same steps. A skipped step changes neither weights nor optimizer states nor the model's buffers;
the order of the samples goes on.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fourfold.comm.communicator import Communicator
from fourfold.comm.reduce.scalars import with_options
from fourfold.model.batch_statistics import NormWatch
from fourfold.model.weights import Weights
from fourfold.orders.sample_order import BatchRange
from fourfold.plan.intervals import is_due
from fourfold.proof.attachment import TensorCalls
from fourfold.proof.digests.batches import DuplicateBatches, check_same_source, samples_digest
from fourfold.proof.digests.weights import DriftChecker, ReplicatedTensor
from fourfold.step.grad_strategies import LocalSteps
from fourfold.step.model_checks import OptimizerWatch
from fourfold.step.step_state import ALL_DAMAGED, NO_ELEMENTS, StepState
from fourfold.torch_kit.torch_private import version_of
from fourfold.words.errors import DivergenceError, FourfoldError, OptimizerError, Problem, TaskError, TrainingError

# ---- collective calls -----------------------------------------------------------------------------------------------


class CollectiveCalls:
    """The calls of one rank on its step."""

    def __init__(self, world: Communicator, checker: TensorCalls) -> None:
        self.world, self.checker = world, checker
        self.num_steps = 0
        """Steps done, including those before a resume: calls name them."""

    def begin(self, call: str, samples: BatchRange | None = None) -> None:
        """Begin a call. Does not wait: the next sum of the loss compares the calls."""
        self.checker.begin(with_samples(f"{call} after step {self.num_steps}", samples))

    def begin_among_tensor_ranks(self, call: str) -> None:
        """Begin a call, and wait until the tensor ranks of this place have begun it: they compute in it together."""
        self.begin(call)
        self.checker.meet()

    def enter(self, call: str) -> None:
        """Begin a call, and wait until all ranks have begun it. Raises DivergenceError."""
        self.begin(call)
        self.checker.check_same()

    def raise_after_mismatch(self, call: str, error: FourfoldError) -> NoReturn:
        """Raise this rank's error, and DivergenceError on the ranks that do not have it; on other stages PeerError."""
        self.checker.begin(call)
        try:
            self.checker.check_same()
        except DivergenceError as divergence:
            if self.world.along("pp").size > 1:
                self.world.leave()  # other stages may wait for this one where they compare batches
            raise error from divergence
        raise error

    def raise_on_all_ranks(self, problems: Sequence[Problem], *, where: str) -> None:
        """Raise TaskError on every rank if any rank has a problem, so that none waits for another. Collective."""
        by_rank: list[Any] = self.world.all_gather_json(problems)
        distinct = dict.fromkeys(tuple(problem) for each in by_rank for problem in each)
        if distinct:
            raise TaskError([Problem(*each) for each in distinct], where=where)


def with_samples(call: str, samples: BatchRange | None) -> str:
    """The call, and its samples in the feed's order if known: ranks in the same step may be at different batches."""
    return call if samples is None else f"{call}, {samples}, {samples.num_samples} samples"


# ---- nan guard ------------------------------------------------------------------------------------------------------


MAX_NAMED_SAMPLES = 64  # of one rank, in a message


class Skipped(NamedTuple):
    """A skipped step. `rank`: the rank whose loss was not finite; None if there were several, or none."""

    text: str
    rank: int | None


class NanGuard:
    """Checks each step of one rank: the first bad step ends the training, and there is nothing to undo."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def save_buffers(self) -> None:
        """Before a step: copy the buffers that forward may change, such as running statistics."""

    def _accept(self) -> None:
        """A step was good."""

    def _skip(self, text: str) -> None:
        """Undo a bad step, which `text` describes. Raises TrainingError if it must not be skipped."""
        raise TrainingError(
            Problem(text, "a finite loss and gradient", "skip_nan=10 to skip such steps"), where="training"
        )

    def check(self, state: StepState, step: int, samples: BatchRange | None) -> Skipped | None:
        """After a step: None if it was good. Collective if it was bad.

        `samples`: of the batch, if known. Raises TrainingError if the step is bad and must not be skipped.
        """
        if state.bad_reason is None:
            self._accept()
            return None
        if state.bad_reason == ALL_DAMAGED:  # there is no forward to undo, and nothing that skip_nan should count
            return Skipped(f"step {step}: {ALL_DAMAGED}", None)
        skipped = self._describe(state, step, samples)
        self._skip(skipped.text)
        return skipped

    def _describe(self, state: StepState, step: int, samples: BatchRange | None) -> Skipped:
        bad = [index for microbatch in state.nonfinite_microbatches() for index in microbatch]
        if samples is not None:
            ids = samples.sample_ids()
            # If every rank's loss is finite, all samples are named: the gradient may be that of any of them.
            names: list[Any] = [[ids[index] for index in bad], ids]
        else:
            names = [bad, []]
        by_rank = self._communicator.all_gather_json([len(bad) > 0, *names])
        bad_ranks = [rank for rank, (is_bad, _, _) in enumerate(by_rank) if is_bad]
        noun = "samples" if samples is not None else "samples of its batch"
        if bad_ranks:
            parts = [f"rank {rank}, {noun} {sample_list(by_rank[rank][1])}" for rank in bad_ranks]
        else:
            parts = [f"rank {rank}, {noun} {sample_list(ids)}" for rank, (_, _, ids) in enumerate(by_rank) if ids]
            parts = [*(["every rank's own loss is finite"] if state.bad_reason != NO_ELEMENTS else []), *parts]
        place = "" if samples is None else f" ({samples})"
        text = f"step {step}: {'; '.join([str(state.bad_reason), *parts])}{place}"
        return Skipped(text, bad_ranks[0] if len(bad_ranks) == 1 else None)


class SkippingNanGuard(NanGuard):
    """The same, but at most `limit` bad steps in a row are skipped."""

    def __init__(self, communicator: Communicator, model: nn.Module, limit: int) -> None:
        super().__init__(communicator)
        self._model, self._limit = model, limit
        self._num_in_a_row = 0
        self._buffers: dict[str, tuple[Tensor, int, Tensor]] = {}

    @torch.no_grad()
    def save_buffers(self) -> None:
        for name, buffer in self._model.named_buffers():
            saved = self._buffers.get(name)
            if saved is None or saved[0] is not buffer or saved[1] != version_of(buffer):
                self._buffers[name] = buffer, version_of(buffer), buffer.clone()

    def _accept(self) -> None:
        self._num_in_a_row = 0

    @torch.no_grad()
    def _skip(self, text: str) -> None:
        for buffer, version, saved in self._buffers.values():
            if version_of(buffer) != version:
                buffer.copy_(saved)
        self._num_in_a_row += 1
        if self._num_in_a_row > self._limit:
            need = f"at most skip_nan = {self._limit} such steps in a row"
            raise TrainingError(Problem(f"{text}; the {self._limit} steps before were bad too", need), where="training")


def sample_list(numbers: list[int], *, limit: int = MAX_NAMED_SAMPLES) -> str:
    """The numbers of a rank's samples, for a message."""
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return ", ".join(map(str, numbers[:limit])) + more


# ---- step checks ----------------------------------------------------------------------------------------------------


class StepChecks:
    """The checks of one rank's steps."""

    def __init__(
        self,
        calls: CollectiveCalls,
        weights: Weights,
        local: LocalSteps,
        *,
        optimizer_watch: OptimizerWatch,
        norms: Sequence[NormWatch],
        duplicate_batches: DuplicateBatches,
        drift_checker: DriftChecker,
        nan_guard: NanGuard,
    ) -> None:
        self._calls, self._weights, self._local = calls, weights, local
        self._optimizer_watch, self._norms = optimizer_watch, norms
        self._duplicate_batches, self._drift_checker, self._nan_guard = duplicate_batches, drift_checker, nan_guard
        self.num_calls = 0
        """Steps done by this object."""

    def before_step(self, batch: Any, *, compares_all: bool, has_pending_updates: bool) -> None:
        """Begin the call of a step, and raise if a step would ignore what has changed. Collective.

        `compares_all`: whether the ranks must have compared their calls before the step's first collective.
        """
        samples = getattr(batch, "samples", None)
        self.check_unchanged(has_pending_updates=has_pending_updates)
        norm_modes = "".join(each.call_text(in_training=True) for each in self._norms)
        call = with_samples(f"step {self._calls.num_steps + 1}{norm_modes}", samples)
        self._calls.checker.begin(with_options(call, self._optimizer_watch.options.text()))
        compares_batches = self._duplicate_batches.num_left > 0 and samples is None
        compares_sources = self.num_calls == 0 and samples is not None
        if compares_all or compares_batches or compares_sources or norm_modes:
            self._calls.checker.check_same()  # before other collectives than sums
        if compares_sources:
            check_same_source(self._calls.world.all_gather_json(getattr(batch, "probe", None)))
        if compares_batches:
            self._duplicate_batches.compare(self._calls.world.all_gather_json(samples_digest(batch)))

    def before_evaluation(self, call: str, samples: BatchRange | None = None) -> None:
        """Begin the call of an evaluation; compare it first where its forward needs other ranks. Collective."""
        norm_modes = "".join(each.call_text(in_training=False) for each in self._norms)
        self._calls.begin(f"{call}{norm_modes}", samples)
        if norm_modes:
            self._calls.checker.check_same()

    def check_unchanged(self, *, has_pending_updates: bool) -> None:
        """Raise if the optimizer or the model has changed since the build in a way that a step would ignore."""
        call = f"step {self._calls.num_steps + 1}"
        if problems := self._optimizer_watch.problems():
            error = OptimizerError(problems, where="the optimizer")
            self._calls.raise_after_mismatch(f"{call}, which its optimizer cannot do", error)
        if problems := [
            *self._weights.guard.problems(),
            *(problem for each in self._norms for problem in each.problems()),
        ]:
            self._calls.raise_after_mismatch(
                f"{call}, which its model cannot do", TaskError(problems, where="the model")
            )
        # In steps 0, 1, 2, 4, 8, … all weights are compared: a loop that writes weights is found early.
        is_early = self.num_calls & (self.num_calls - 1) == 0
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
        self._nan_guard.save_buffers()

    def after_step(self, step: StepState, samples: BatchRange | None) -> Skipped | None:
        """After a step, which is counted: None if it was good. Collective if it was bad. Raises TrainingError."""
        if step.has_called_hooks:
            self._weights.guard.check()  # a hook may have replaced the storage of parameters
        self.num_calls += 1
        self._calls.num_steps += 1
        return self._nan_guard.check(step, self._calls.num_steps, samples)

    def compare_replicas_if_due(self, tensors: Iterable[ReplicatedTensor]) -> None:
        """After a step: `compare_replicas` if `drift_check` says so. `tensors` are read only then."""
        if self._drift_checker.is_due(self._calls.num_steps, self._local.interval):
            self.compare_replicas(tensors)

    def compare_replicas(self, tensors: Iterable[ReplicatedTensor]) -> None:
        """Raise DivergenceError, on every rank, if replicas of weights differ. Collective."""
        when = f"after step {self._calls.num_steps}"
        self._drift_checker.compare(tensors, when, update_kind=self._optimizer_watch.options.implementation())
