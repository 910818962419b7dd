"""Unbucketed gradients: those of a rank that trains its weights alone stay where autograd leaves them.

complete  a bucket whose parameters all have their gradient of the step; it may be updated while backward continues
earlier   the sum of a step's microbatches so far, of a parameter with hooks of the user: they see one microbatch's
          gradient, which they may scale or clamp
Law: a step computes what it would compute with `GradBuckets`, but copies nothing and has no slots.
"""

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.work.gradients import Countdown, check_all_reached, check_untouched
from fourfold.comm.meter import CommMeter
from fourfold.optim.flat_optimizer import UpdateSlice
from fourfold.torch_kit.grad_hooks import check_dense, check_not_cleared, has_user_hooks, raise_second_grad
from fourfold.words.trace_events import DONE_EVENT, LAUNCHED_EVENT, READY_EVENT


class UnbucketedGrads:
    """The gradients of a step of a rank alone; see `Gradients`. A step has one round."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        meter: CommMeter,
        *,
        allow_unused: bool,
    ) -> None:
        self._allow_unused, self._meter = allow_unused, meter
        self._parameters = [[parameters[slot.name] for slot in bucket.slots] for bucket in buckets]
        self._all_parameters = list(itertools.chain.from_iterable(self._parameters))
        self._detached_grads: list[list[Tensor | None]] = [[] for _ in buckets]
        self._earlier: dict[int, Tensor] = {}
        self.countdown = Countdown(buckets)

    def set_launch_order(self, order: Sequence[int]) -> None:
        """Fix the order in which buckets are updated."""
        self.countdown.launch_order = list(order)

    def begin_step(self) -> None:
        """Begin a step."""
        self._earlier = {}
        self.countdown.begin_step()

    def begin_round(self, buckets: Sequence[int], number: int) -> None:
        """Begin a round."""
        self.countdown.begin_round(buckets, number)

    def store(self, param_index: int) -> bool:
        """Check a gradient that autograd has accumulated. Returns whether a bucket is complete now."""
        countdown, parameter = self.countdown, self._all_parameters[param_index]
        if parameter.grad is None:
            check_not_cleared(parameter, countdown.names[param_index])
            return False
        check_dense(parameter.grad, countdown.names[param_index])
        countdown.reached[param_index] = True
        self._add_earlier(param_index)
        if not countdown.is_last_backward:
            if has_user_hooks(parameter):
                self._earlier[param_index], parameter.grad = parameter.grad, None
            return False
        if countdown.counted[param_index]:
            raise_second_grad(countdown.names[param_index])
        if not countdown.count(param_index):
            return False
        self._meter.recorder.instant(countdown.bucket_of[param_index], READY_EVENT)
        return True

    def _add_earlier(self, param_index: int) -> None:
        """Add to a gradient what was set aside of it."""
        earlier, parameter = self._earlier.pop(param_index, None), self._all_parameters[param_index]
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def launch_next(self, factor: float | None, *, may_wait: bool) -> int | None:
        """Count the next bucket in program order as launched if it is complete. Returns it, or None."""
        bucket = self.countdown.next_complete()
        if bucket is not None:
            self._meter.recorder.instant(bucket, LAUNCHED_EVENT)
            self.countdown.num_launched += 1
        return bucket

    def record_done(self, bucket: int) -> None:
        """Record that a bucket's sum is there."""
        self._meter.recorder.instant(bucket, DONE_EVENT)

    def check_untouched(self) -> None:
        """Raise TrainingError naming a parameter that has a gradient before the first backward of the step."""
        check_untouched(self.countdown, self._all_parameters)

    def check_all_reached(self, buckets: Sequence[int]) -> None:
        """Raise TrainingError naming the parameters of these buckets that no backward of the step has reached."""
        for index, parameter in enumerate(self._all_parameters):
            if parameter.grad is not None and self.countdown.bucket_of[index] in buckets:
                self.countdown.reached[index] = True  # perhaps by a backward within forward
        for param_index in [index for index in self._earlier if self.countdown.bucket_of[index] in buckets]:
            self._add_earlier(param_index)  # the last backward has not reached it
        if not self._allow_unused:
            check_all_reached(self.countdown, buckets, self._all_parameters)

    def local_grads(self, bucket: int) -> list[Tensor]:
        """The gradients of a bucket, for the norm; no copies."""
        return [parameter.grad for parameter in self._parameters[bucket] if parameter.grad is not None]

    def drop_grads(self) -> None:
        """Drop what is in `.grad`: backwards outside of steps have left it there."""
        for parameter in self._all_parameters:
            parameter.grad = None

    def detach_grads(self) -> None:
        """Move the gradients out of `.grad`, which the user may clear: they are used after the step."""
        self._detached_grads = [[parameter.grad for parameter in members] for members in self._parameters]
        self.drop_grads()

    def restore_grads(self, bucket: int) -> None:
        """Put a bucket's gradients back into `.grad`, where the update reads them."""
        for parameter, gradient in zip(self._parameters[bucket], self._detached_grads[bucket], strict=True):
            parameter.grad = gradient
        self._detached_grads[bucket] = []

    def free_grads(self, bucket: int) -> None:
        """Free a bucket's gradients after their update: their memory serves the next ones."""
        for parameter in self._parameters[bucket]:
            parameter.grad = None

    def update_slices(self, weights: Sequence[Tensor], buckets: Sequence[Bucket]) -> list[list[UpdateSlice]]:
        """The slices that the update works on, by bucket: one for each parameter."""
        return [
            [
                UpdateSlice(slot.start, slot.stop, weight[slot.start : slot.stop], parameter, number)
                for number, (slot, parameter) in enumerate(zip(bucket.slots, members, strict=True))
            ]
            for bucket, members, weight in zip(buckets, self._parameters, weights, strict=True)
        ]
