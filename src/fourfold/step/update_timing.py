"""Update timing: when buckets are updated: after backward, in backward, or in the next forward.

timing   what a mode of the plan's `update` replaces in the table of verbs, and what it does between steps
pending  a bucket whose gradients of the last step are reduced, and whose weights are not updated yet
due      a bucket that is about to be used: it is updated now, together with all buckets before it in the order
missed   a bucket that forward used without a report of the access
Law: whatever the timing, every use of a weight sees it updated, and every update sees the same gradient. All ranks
update in the same order, whatever the order in which each of them uses its buckets.

The order is the same because ranks of a host share weights: before a rank uses a bucket, it waits for the shards of it
that the other ranks update. A rank that updates all buckets up to the one it waits for never keeps another rank waiting
for longer than its own forward.

Source: Jiang, Gu, Liu, Zhu, Pan, "Optimizer Fusion" (2021): forward fusion.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from fourfold.step.step_state import StepParts, StepState, UpdateArgs
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
    run_optimizer,
    update_bucket,
    wait_all,
)
from fourfold.torch_kit.grad_hooks import GradSink
from fourfold.torch_kit.param_access import ParamAccess, outside_transforms
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import Action, Verb


def end_stages(parts: StepParts) -> None:
    """The sums of the step are needed no more. The weights are whole when this returns."""
    parts.stage.reducer.end_step()
    parts.stage.gatherer.end_step()


def begin_gradients(parts: StepParts) -> None:
    """The next backward is the first one of a batch: there are no gradients."""
    parts.stage.gradients.drop_grads()
    parts.stage.gradients.begin_step()


class UpdateTiming:
    """When buckets are updated: here within their step; `verbs` say when."""

    def __init__(self, verbs: Mapping[Verb, VerbFunction]) -> None:
        self.verbs = verbs
        """The table of verbs in training."""

    def begin_step(self, step: StepState) -> None:
        begin_gradients(step.parts)

    def end_step(self, step: StepState) -> None:
        """End a step without an error: gradient buffers may be overwritten, unless updates that wait need them."""
        end_stages(step.parts)

    def newest_ended(self, step: StepState) -> StepState:
        """The newest batch, of this step or of one before, that has ended on all ranks."""
        return step

    def flush(self) -> None:
        """Run the updates that wait. Collective."""

    @property
    def has_pending(self) -> bool:
        """Whether updates wait: this rank's, or those of ranks that share weights with it."""
        return False


def _update_after_backward(step: StepState, action: Action) -> None:
    """Update a bucket when no rank of the host reads the weights of this step."""
    stage, bucket = step.stage, action.index
    if is_update_due(step, bucket):
        if not step.has_begun_updates:
            # Backward may read a weight after its gradient is complete, if the weight is also used without gradient.
            stage.gatherer.signal_backward_done()
            stage.gatherer.wait_writable()
        update_bucket(step, action)
    stage.gradients.free_grads(bucket)


class _UpdateSink:
    """Launches the buckets that gradients complete, and updates those that are reduced, in program order."""

    def __init__(self, step: StepState, action: Action) -> None:
        self._step, self._stage = step, step.stage
        self._buckets = self._stage.buckets_of(action.stage)
        self._has_all_grads = self._stage.rounds.has_all_grads(action.index, len(step.microbatches))
        self._num_updated = 0

    def on_grad(self, param_index: int) -> None:
        if not self._stage.gradients.store(param_index):
            return
        while (bucket := launch_next(self._step, may_wait=False)) is not None:
            if self._has_all_grads:
                # From now on other ranks of the host may write the bucket's weights, if they share them.
                self._stage.weights.edits.increment_version(bucket)
                self._update_reduced()

    def _update_reduced(self) -> None:
        """Update the launched buckets up to the first whose reduction has not ended. Never waits."""
        launched = [each for each in self._stage.gradients.countdown.launched if each in self._buckets]
        for bucket in launched[self._num_updated :]:
            scale = self._step.poll_grad_scale()
            if scale is None or not self._stage.reducer.is_reduced(bucket, self._stage.scaling.sum_factor(scale)):
                return
            if not self._stage.gatherer.can_gather():  # a rank that this one would wait for may wait for its gradients
                return
            self._num_updated += 1
            for verb in self._stage.update_verbs:
                action = Action(verb, self._stage.pp_index, bucket)
                with self._step.parts.meter.recorder.action(action):
                    VERBS[verb](self._step, action)
                self._step.done_early.add(action)


def _with_updates(run: Callable[[StepState, Action, GradSink], None]) -> VerbFunction:
    """A backward, or the half that completes the buckets; a bucket is updated as soon as its reduction has ended.

    All buckets of the round are launched when the verb returns. In the program an update stands before reductions of
    other buckets; if it waited for the totals first, a rank whose backward waits for one of these sums would never send
    its own totals.
    """

    def backward_with_updates(step: StepState, action: Action) -> None:
        run(step, action, _UpdateSink(step, action))
        while launch_next(step, may_wait=True) is not None:
            pass

    return backward_with_updates


UPDATE_AFTER: Mapping[Verb, VerbFunction] = {**VERBS, Verb.UPDATE: _update_after_backward}
UPDATE_IN_BACKWARD: Mapping[Verb, VerbFunction] = {
    **VERBS,
    Verb.BACKWARD: _with_updates(run_backward),
    Verb.BACKWARD_WEIGHT: _with_updates(run_backward_weight),
}


class UpdateInForward(UpdateTiming):
    """Buckets are updated when the next forward uses them, or when the updates are flushed."""

    def __init__(self, parts: StepParts, in_place: Sequence[Sequence[nn.Parameter]]) -> None:
        """`in_place`: by bucket and slot, the parameters that are reported when they are accessed.

        There are none where weights rest split: these are reported when they are unsharded.
        """
        super().__init__(
            {
                **VERBS,
                Verb.FORWARD: self._forward,
                Verb.BACKWARD: self._backward,
                Verb.BACKWARD_INPUT: self._backward_input,
            }
        )
        self._parts, self._stage = parts, parts.stage
        self._param_access, self._num_reported = ParamAccess(in_place), len(in_place)
        self._args: UpdateArgs | None = None
        self._order: Sequence[int] = ()
        self._position: dict[int, int] = {}
        self._num_updated, self._num_ready = 0, 0
        self._in_forward = False
        self._was_accessed = [True] * self._num_reported
        """By bucket that is reported when it is accessed."""

    @property
    def has_pending(self) -> bool:
        return len(self._order) > 0

    def begin_step(self, step: StepState) -> None:
        """The updates in front of the first forward are those of the step before: forward runs them."""
        super().begin_step(step)
        stage = self._stage
        step.done_early |= {
            Action(verb, stage.pp_index, bucket) for verb in stage.update_verbs for bucket in range(stage.num_buckets)
        }
        # While no update is pending, an access without a report is harmless.
        self._was_accessed = [True] * self._num_reported

    def end_step(self, step: StepState) -> None:
        """Make the updates of all buckets pending, with the gradients of the step."""
        step.read_totals()
        wait_all(step)
        if step.is_skipped:
            self._stage.gradients.drop_grads()
            end_stages(self._parts)
            return
        self._stage.gradients.detach_grads()
        self._stage.gatherer.signal_backward_done()
        self._stage.optimizer.set_options_frozen(frozen=True)
        self._args = step.update_args
        # The bucket that backward completes last is mostly used first.
        self._order = list(self._stage.gradients.countdown.launch_order[::-1])
        self._position = {bucket: position for position, bucket in enumerate(self._order)}
        self._num_updated, self._num_ready = 0, 0
        self._param_access.sink = self

    def flush(self) -> None:
        """Run the pending updates. With weights shared on a host, returns when all its ranks have."""
        self._run_pending()
        self._stage.weights.edits.refresh_samples()

    def _run_pending(self) -> None:
        if self.has_pending:
            self._update_up_to(len(self._order) - 1)
            self._order = ()
            self._param_access.sink = None
            self._stage.gatherer.end_step()
            self._stage.optimizer.set_options_frozen(frozen=False)

    # ---- verbs

    def _forward(self, step: StepState, action: Action) -> None:
        step.unshard_sink = self
        with self._running(self._stage.buckets_of(action.stage)):
            forward(step, action)

    def _backward(self, step: StepState, action: Action) -> None:
        backward(step, action)
        self._end_first_backward(action)

    def _backward_input(self, step: StepState, action: Action) -> None:
        backward_input(step, action)
        self._end_first_backward(action)

    @contextlib.contextmanager
    def _running(self, buckets: Sequence[int]) -> Iterator[None]:
        """Inside, a stage runs, which computes with these buckets: an access runs the updates that are due.

        At the end none of theirs is pending.
        """
        if not self.has_pending:
            yield
            return
        last = max(map(self._position.__getitem__, buckets), default=-1)
        if last >= self._num_updated and self._num_reported:
            for bucket in buckets:
                self._was_accessed[bucket] = False
        self._in_forward = True
        try:
            with self._param_access.with_transforms():
                yield
        finally:
            self._in_forward = False
        self._update_up_to(last)
        if self._num_updated == len(self._order):
            self._run_pending()

    def _end_first_backward(self, action: Action) -> None:
        """Raise TrainingError if backward has reached a bucket of its stage and forward reported no access to it."""
        if action.index > 0:
            return
        missed = [
            name
            for bucket in self._stage.buckets_of(action.stage)[: self._num_reported]
            if not self._was_accessed[bucket] and (name := self._stage.gradients.countdown.first_reached(bucket))
        ]
        if missed:
            got = f"a use of {missed[0]} that torch did not report: forward used the weights before their update"
            need = "operations of torch, or registered with torch.library"
            raise TrainingError(Problem(got, need, 'update = "after"'))

    def before_unshard(self, bucket: int) -> None:
        """This rank's shard of a bucket is about to be read."""
        if self.has_pending:
            with outside_transforms(self._device_type):
                self._update_up_to(self._position[bucket])

    def before_access(self, bucket: int) -> None:
        """A parameter of a bucket is about to be read, in place."""
        self._was_accessed[bucket] = True
        position = self._position[bucket]
        if position < self._num_ready:
            return
        if not self._in_forward:
            got = "a weight used between steps, while its update waits for the next forward"
            raise TrainingError(Problem(got, "the update first", "step.flush() on every rank"))
        with outside_transforms(self._device_type):
            self._update_up_to(position)
            self._stage.gatherer.wait(bucket)
        self._num_ready = position + 1

    @property
    def _device_type(self) -> str:
        return self._stage.parameters[0][0].device.type

    def _update_up_to(self, position: int) -> None:
        while self._num_updated <= position:
            self._num_updated += 1
            self._update(self._order[self._num_updated - 1])
            if self._num_updated == len(self._order):
                # At once: no rank of a host may store gradients before all of them have signalled this.
                self._stage.reducer.end_step()

    def _update(self, bucket: int) -> None:
        """Update a bucket with the gradient of the previous step."""
        stage, recorder = self._stage, self._parts.meter.recorder
        assert self._args is not None
        with recorder.action(Action(Verb.UPDATE, self._stage.pp_index, bucket)):
            stage.gatherer.wait_writable()
            stage.gradients.restore_grads(bucket)
            run_optimizer(stage, bucket, self._args)
            stage.gradients.free_grads(bucket)
        for verb in stage.update_verbs[1:]:
            with recorder.action(Action(verb, self._stage.pp_index, bucket)):
                stage.gatherer.all_gather_async(bucket, stage.weights.flats[bucket])
