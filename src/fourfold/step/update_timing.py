"""Update timing: when buckets are updated: after backward, in backward, or in the next forward.

timing  what a mode of the plan's `update` replaces in the table of verbs, and what it does between steps
Law: whatever the timing, every use of a weight sees it updated, and every update sees the same gradient.
"""

from collections.abc import Mapping
from typing import Protocol

from fourfold.step.forward_fusion import DeferredUpdates
from fourfold.step.stage import Stage
from fourfold.step.step_state import StepParts, StepState
from fourfold.step.verbs import (
    VERBS,
    VerbFunction,
    backward,
    backward_input,
    forward,
    is_update_due,
    launch_next,
    run_backward,
    run_backward_weight,
    update_bucket,
    wait_all,
)
from fourfold.words.program import Action, Verb


class UpdateTiming(Protocol):
    """When buckets are updated."""

    @property
    def verbs(self) -> Mapping[Verb, VerbFunction]:
        """The table of verbs in training."""
        ...

    def begin_step(self, step: StepState) -> None: ...

    def end_step(self, step: StepState) -> None:
        """End a step without an error: gradient buffers may be overwritten, unless updates that wait need them."""
        ...

    def ended(self, step: StepState) -> StepState:
        """The newest batch, of this step or of one before, that has ended on all ranks."""
        ...

    def flush(self) -> None:
        """Run the updates that wait. Collective."""
        ...

    @property
    def has_pending(self) -> bool:
        """Whether updates wait: this rank's, or those of ranks that share weights with it."""
        ...


def end_stages(parts: StepParts) -> None:
    """The sums of the step are needed no more. The weights are whole when this returns."""
    parts.stage.reducer.end_step()
    parts.stage.gatherer.end_step()


def begin_gradients(parts: StepParts) -> None:
    """The next backward is the first one of a batch: there are no gradients."""
    parts.stage.gradients.drop_grads()
    parts.stage.gradients.begin_step()


class ImmediateUpdates:
    """Every bucket is updated within its step: `verbs` say when."""

    def __init__(self, verbs: Mapping[Verb, VerbFunction]) -> None:
        self.verbs = verbs

    def begin_step(self, step: StepState) -> None:
        begin_gradients(step.parts)

    def end_step(self, step: StepState) -> None:
        end_stages(step.parts)

    def ended(self, step: StepState) -> StepState:
        return step

    def flush(self) -> None:
        pass

    @property
    def has_pending(self) -> bool:
        return False


def _update_after_backward(step: StepState, action: Action) -> None:
    """Update a bucket when no rank of the host reads the weights of this step."""
    stage, bucket = step.stage, action.index
    if is_update_due(step, stage, bucket):
        if not step.has_begun_updates:
            # Backward may read a weight after its gradient is complete, if the weight is also used without gradient.
            stage.gatherer.signal_backward_done()
            stage.gatherer.wait_writable()
        update_bucket(step, action)
    stage.gradients.free_grads(bucket)


class _UpdateSink:
    """Launches the buckets that gradients complete, and updates those that are reduced, in program order."""

    def __init__(self, step: StepState, stage: Stage, action: Action) -> None:
        self._step, self._stage = step, stage
        self._buckets = stage.buckets_of(action.stage)
        self._has_all_grads = stage.rounds.has_all_grads(action.index, len(step.microbatches))
        self._num_updated = 0

    def on_grad(self, param_index: int) -> None:
        if not self._stage.gradients.store(param_index):
            return
        while (bucket := launch_next(self._step, self._stage, may_wait=False)) is not None:
            if self._has_all_grads:
                # From now on other ranks of the host may write the bucket's weights, if they share them.
                self._stage.weights.edits.increment_version(bucket)
                self._update_reduced()

    def _update_reduced(self) -> None:
        """Update the launched buckets up to the first whose reduction has not ended. Never waits."""
        launched = [each for each in self._stage.gradients.countdown.launched if each in self._buckets]
        for bucket in launched[self._num_updated :]:
            scale = self._step.poll_grad_scale()
            if scale is None or not self._stage.reducer.is_reduced(bucket, self._step.parts.scaling.sum_factor(scale)):
                return
            if not self._stage.gatherer.can_gather():  # a rank that this one would wait for may wait for its gradients
                return
            self._num_updated += 1
            for verb in self._stage.update_verbs:
                action = Action(verb, self._stage.pp_index, bucket)
                with self._step.parts.meter.recorder.action(action):
                    VERBS[verb](self._step, action)
                self._step.done_early.add(action)


def _backward_with_updates(step: StepState, action: Action) -> None:
    """The gradients of a microbatch; a bucket is updated as soon as its reduction has ended.

    All buckets of the round are launched when this returns. In the program an update stands before reductions of other
    buckets; if it waited for the totals first, a rank whose backward waits for one of these sums would never send its
    own totals.
    """
    stage = step.stage
    run_backward(step, action, _UpdateSink(step, stage, action))
    while launch_next(step, stage, may_wait=True) is not None:
        pass


UPDATE_AFTER: Mapping[Verb, VerbFunction] = {**VERBS, Verb.UPDATE: _update_after_backward}


def _backward_weight_with_updates(step: StepState, action: Action) -> None:
    """As `_backward_with_updates`, of the half that completes the buckets."""
    stage = step.stage
    run_backward_weight(step, action, _UpdateSink(step, stage, action))
    while launch_next(step, stage, may_wait=True) is not None:
        pass


UPDATE_IN_BACKWARD: Mapping[Verb, VerbFunction] = {
    **VERBS,
    Verb.BACKWARD: _backward_with_updates,
    Verb.BACKWARD_WEIGHT: _backward_weight_with_updates,
}


class UpdateInForward:
    """Buckets are updated when the next forward uses them, or when the updates are flushed."""

    def __init__(self, parts: StepParts, deferred: DeferredUpdates) -> None:
        self._parts, self._deferred = parts, deferred
        self.verbs: Mapping[Verb, VerbFunction] = {
            **VERBS,
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.BACKWARD_INPUT: self._backward_input,
        }

    def _forward(self, step: StepState, action: Action) -> None:
        step.unshard_sink = self._deferred
        with self._deferred.in_forward(step.stage.buckets_of(action.stage)):
            forward(step, action)

    def _backward(self, step: StepState, action: Action) -> None:
        backward(step, action)
        self._end_first_backward(step, action)

    def _backward_input(self, step: StepState, action: Action) -> None:
        backward_input(step, action)
        self._end_first_backward(step, action)

    def _end_first_backward(self, step: StepState, action: Action) -> None:
        if action.index == 0:
            buckets = step.stage.buckets_of(action.stage)
            self._deferred.check_missed_accesses(buckets)

    def begin_step(self, step: StepState) -> None:
        """The updates in front of the first forward are those of the step before: forward runs them."""
        begin_gradients(step.parts)
        stage = step.stage
        step.done_early |= {
            Action(verb, stage.pp_index, bucket) for verb in stage.update_verbs for bucket in range(stage.num_buckets)
        }
        self._deferred.begin_step()

    def end_step(self, step: StepState) -> None:
        step.read_totals()
        wait_all(step, step.stage)
        if step.is_skipped:
            step.stage.gradients.drop_grads()
            end_stages(self._parts)
            return
        self._deferred.defer(step.update_args)

    def ended(self, step: StepState) -> StepState:
        return step

    def flush(self) -> None:
        self._deferred.finish()

    @property
    def has_pending(self) -> bool:
        return self._deferred.has_pending
