"""Forward fusion: updates that wait until the next forward uses the weights.

pending  a bucket whose gradients of the last step are reduced, and whose weights are not updated yet
due      a bucket that is about to be used: it is updated now, together with all buckets before it in the order
missed   a bucket that forward used without a report of the access
Law: every use of a weight sees the updated weight. All ranks update in the same order, whatever the order in which
each of them uses its buckets.

The order is the same because ranks of a host share weights: before a rank uses a bucket, it waits for the shards of it
that the other ranks update. A rank that updates all buckets up to the one it waits for never keeps another rank waiting
for longer than its own forward.

Source: Jiang, Gu, Liu, Zhu, Pan, "Optimizer Fusion" (2021): forward fusion.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from fourfold.comm.meter import CommMeter
from fourfold.step.stage import Stage
from fourfold.step.step_state import UpdateArgs
from fourfold.step.verbs import run_optimizer
from fourfold.torch_kit.param_access import ParamAccess, outside_transforms
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import Action, Verb


class DeferredUpdates:
    """The updates of one step of a stage, run in the forward of the next step, or when `finish` is called."""

    def __init__(self, stage: Stage, meter: CommMeter, in_place: Sequence[Sequence[nn.Parameter]]) -> None:
        """`in_place`: by bucket and slot, the parameters that are reported when they are accessed.

        There are none where weights rest split: these are reported when they are unsharded.
        """
        self._stage, self._meter = stage, meter
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
        """Whether updates are pending."""
        return len(self._order) > 0

    def defer(self, args: UpdateArgs) -> None:
        """Make the updates of all buckets pending, with the gradients of the step that has just ended."""
        self._stage.gradients.detach_grads()
        self._stage.gatherer.signal_backward_done()
        self._stage.optimizer.set_options_frozen(frozen=True)
        self._args = args
        # The bucket that backward completes last is mostly used first.
        self._order = list(self._stage.gradients.countdown.launch_order[::-1])
        self._position = {bucket: position for position, bucket in enumerate(self._order)}
        self._num_updated, self._num_ready = 0, 0
        self._param_access.sink = self

    def begin_step(self) -> None:
        """Begin a step. While no update is pending, an access without a report is harmless."""
        self._was_accessed = [True] * self._num_reported

    @contextlib.contextmanager
    def in_forward(self, buckets: Sequence[int]) -> Iterator[None]:
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

    def finish(self) -> None:
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

    def check_missed_accesses(self, buckets: Sequence[int]) -> None:
        """Raise TrainingError if backward has reached one of these buckets and forward reported no access to it."""
        missed = [
            name
            for bucket in buckets[: self._num_reported]
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
        stage, recorder = self._stage, self._meter.recorder
        assert self._args is not None
        with recorder.action(Action(Verb.UPDATE, self._stage.pp_index, bucket)):
            stage.gatherer.wait_writable()
            stage.gradients.restore_grads(bucket)
            run_optimizer(stage, bucket, self._args)
            stage.gradients.free_grads(bucket)
        for verb in stage.update_verbs[1:]:
            with recorder.action(Action(verb, self._stage.pp_index, bucket)):
                stage.gatherer.all_gather_async(bucket, stage.weights.flats[bucket])
