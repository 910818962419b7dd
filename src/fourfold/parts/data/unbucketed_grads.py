"""Unbucketed gradients: the gradients of a single rank stay where autograd leaves them.

complete  a bucket whose parameters all have their gradient of the step; it may be updated while backward continues
Law: a step computes what it would compute with `GradBuckets`, but copies nothing and has no slots.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from fourfold.parts.data.grad_checks import check_all_reached, check_dense, raise_grad_cleared, raise_second_grad
from fourfold.parts.data.grad_hooks import register_last_hook, weak_grad_hook
from fourfold.parts.optim.update_slices import UpdateSlice
from fourfold.plan.data.buckets import Bucket
from fourfold.words.noop import noop
from fourfold.words.trace_events import LAUNCHED_EVENT, NULL_RECORDER, READY_EVENT


class UnbucketedGrads:
    """The gradients of a step of a single rank; the same interface as `GradBuckets`."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], *, allow_unused: bool
    ) -> None:
        self._allow_unused = allow_unused
        self._names = [slot.name for bucket in buckets for slot in bucket.slots]
        self._bucket_of = [bucket.index for bucket in buckets for _ in bucket.slots]
        self._parameters = [[parameters[slot.name] for slot in bucket.slots] for bucket in buckets]
        self._detached_grads: list[list[Tensor | None]] = [[] for _ in buckets]
        self.launch_order: Sequence[int] = list(range(len(buckets)))
        """The order in which buckets are updated."""
        self.recorder, self.is_enabled = NULL_RECORDER, False
        self.on_launch: Callable[[], None] = noop
        self.completion_order: list[int] = []
        for number, name in enumerate(self._names):
            register_last_hook(parameters[name], weak_grad_hook(self, number))
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step."""
        self.reached = [False] * len(self._names)
        self.completion_order = []
        self._counted = [False] * len(self._names)
        self._num_missing = [len(members) for members in self._parameters]
        self._is_last_backward, self.num_launched = False, 0

    def mark_last_backward(self) -> None:
        """The next backward is the step's last: buckets may be updated as they become complete."""
        self._is_last_backward = True

    def on_grad(self, parameter: Tensor, param_index: int) -> None:
        """Check a gradient that autograd has accumulated; in the last backward, count it."""
        if not self.is_enabled:
            return
        if parameter.grad is None:
            raise_grad_cleared(self._names[param_index])
        check_dense(parameter.grad, self._names[param_index])
        self.reached[param_index] = True
        if self._is_last_backward:
            self._count_down(param_index)

    def _count_down(self, param_index: int) -> None:
        if self._counted[param_index]:
            raise_second_grad(self._names[param_index])
        self._counted[param_index] = True
        bucket = self._bucket_of[param_index]
        self._num_missing[bucket] -= 1
        if self._num_missing[bucket] == 0:
            self.completion_order.append(bucket)
            self.recorder.instant(bucket, READY_EVENT)
            self._launch_ready()

    def _launch_ready(self) -> None:
        while (
            self.num_launched < len(self.launch_order) and not self._num_missing[self.launch_order[self.num_launched]]
        ):
            self.recorder.instant(self.launch_order[self.num_launched], LAUNCHED_EVENT)
            self.num_launched += 1
            self.on_launch()

    def finish_round(self) -> None:
        """End the step's gradients: all remaining buckets are complete."""
        self.completion_order += [bucket for bucket, missing in enumerate(self._num_missing) if missing]
        self._num_missing = [0] * len(self._num_missing)
        self._launch_ready()

    def local_grads(self, bucket: int) -> list[Tensor]:
        """The gradients of a bucket, for the norm; no copies."""
        return [parameter.grad for parameter in self._parameters[bucket] if parameter.grad is not None]

    def detach_grads(self) -> None:
        """Move the gradients out of `.grad`, which the user may clear: they are used after the step."""
        self._detached_grads = [[parameter.grad for parameter in members] for members in self._parameters]
        self.drop_grads()

    def restore_grads(self, bucket: int) -> None:
        """Put a bucket's gradients back into `.grad`, where the update reads them."""
        for parameter, gradient in zip(self._parameters[bucket], self._detached_grads[bucket], strict=True):
            parameter.grad = gradient
        self._detached_grads[bucket] = []

    def first_reached(self, bucket: int) -> str | None:
        """The name of the bucket's first parameter that a backward of this step has reached; None if there is none."""
        params = zip(self._names, self._bucket_of, self.reached, strict=True)
        return next((name for name, of, reached in params if of == bucket and reached), None)

    def free_grads(self, bucket: int) -> None:
        """Free a bucket's gradients after their update: their memory serves the next ones."""
        for parameter in self._parameters[bucket]:
            parameter.grad = None

    def drop_grads(self) -> None:
        """Drop what is in `.grad`: backwards outside of steps have left it there."""
        for bucket in range(len(self._parameters)):
            self.free_grads(bucket)

    def check_all_reached(self) -> None:
        """Raise TrainingError naming the parameters that no backward of the step has reached."""
        if not self._allow_unused:
            check_all_reached(self._names, self.reached, itertools.chain.from_iterable(self._parameters))

    def update_slices(self, weights: Sequence[Tensor], buckets: Sequence[Bucket]) -> list[list[UpdateSlice]]:
        """The slices that the update works on, by bucket: one for each parameter."""
        return [
            [
                UpdateSlice(slot.start, slot.stop, weight[slot.start : slot.stop], parameter, number)
                for number, (slot, parameter) in enumerate(zip(bucket.slots, members, strict=True))
            ]
            for bucket, members, weight in zip(buckets, self._parameters, weights, strict=True)
        ]
