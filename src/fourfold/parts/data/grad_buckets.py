"""Gradient buckets: hooks copy gradients from autograd into slots, and complete buckets are reduced.

slot       a parameter's place in the gradient buffer of its bucket, [start, stop)
countdown  number of a bucket's parameters without a gradient in the round's last backward; at 0 the bucket is complete
launch     the start of a bucket's reduction, in program order (the same on every rank), while backward continues
round      the backwards between two sets of reductions: those of a whole step, or one if gradients rest split
waiting    a gradient that stays in `.grad` because the buffer still holds the gradient of another bucket
Law: at the end of a round every slot is written or known to be unused, and every bucket is launched.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.parts.comm.reduce.protocol import GradReducer
from fourfold.parts.data.grad_checks import (
    check_all_reached,
    check_dense,
    raise_grad_cleared,
    raise_grad_has_graph,
    raise_second_grad,
)
from fourfold.parts.data.grad_hooks import register_last_hook, weak_grad_hook
from fourfold.parts.data.param_access import untracked_access
from fourfold.plan.data.buckets import Bucket
from fourfold.words.noop import noop
from fourfold.words.trace_events import LAUNCHED_EVENT, NULL_RECORDER, READY_EVENT


def _view_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """A view of a flat with the parameter's shape and memory format: fused updates traverse both at once."""
    with untracked_access():
        return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


def _unit_factor() -> float:
    return 1.0


class GradBuckets:
    """The gradients of a step in the reducer's buffers."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        reducer: GradReducer,
        *,
        allow_unused: bool,
        waits_in_hooks: bool = True,
    ) -> None:
        """`waits_in_hooks`: whether hooks may wait for a buffer that a reduction still uses."""
        self._parameters, self._buckets, self._reducer = parameters, buckets, reducer
        self._allow_unused = allow_unused
        self.recorder = NULL_RECORDER
        self._names = [slot.name for bucket in buckets for slot in bucket.slots]
        self._bucket_of = [bucket.index for bucket in buckets for _ in bucket.slots]
        self._paddings = [reducer.grad_buffers[bucket.index][bucket.slots[-1].stop :] for bucket in buckets]
        self._first_param = list(itertools.accumulate((len(bucket.slots) for bucket in buckets), initial=0))
        self.views = [
            _view_like(parameters[slot.name], reducer.grad_buffers[bucket.index][slot.start : slot.stop])
            for bucket in buckets
            for slot in bucket.slots
        ]
        # Counted with the same expression as in `copy_referenced_views`, which adds references of its own.
        self._num_view_refs = [sys.getrefcount(self.views[index]) for index in range(len(self.views))]
        self.launch_order = list(range(len(buckets)))
        self.on_launch: Callable[[], None] = noop
        """Called after every launch."""
        self.is_enabled = False
        """Whether gradients are stored. Off outside of steps, whose backwards are the user's own."""
        self.grad_factor: Callable[[], float | None] = _unit_factor
        """The factor of the sums, None while it is not known."""
        # Not if weights are all-gathered in backward: the rank that must end the reduction may itself wait for an
        # all-gather that this rank has not begun.
        self._waits_in_hooks = waits_in_hooks
        self.completion_order: list[int] = []
        """The order in which this rank's buckets became complete in the first round of this step."""
        for index, name in enumerate(self._names):
            register_last_hook(parameters[name], weak_grad_hook(self, index))
        self.begin_step()

    @property
    def launch_order(self) -> Sequence[int]:
        """The order of the reductions."""
        return self._launch_order

    @launch_order.setter
    def launch_order(self, order: Sequence[int]) -> None:
        self._launch_order = list(order)
        # By bucket: the bucket that uses the same buffer before it, in launch order.
        last_user: dict[int, int] = {}
        self._prev_in_buffer: list[int | None] = [None] * len(order)
        for bucket in order:
            buffer = self._reducer.buffer_indices[bucket]
            self._prev_in_buffer[bucket] = last_user.get(buffer)
            last_user[buffer] = bucket
        self._launch_index = {bucket: index for index, bucket in enumerate(order)}

    def begin_step(self) -> None:
        """Begin a step: no slot is written, no bucket launched."""
        self.reached = [False] * len(self._names)
        self._round = -1
        self.completion_order = []
        self.begin_round()

    def begin_round(self) -> None:
        """Begin a round of reductions."""
        self._round += 1
        self._written = [False] * len(self._names)
        self._counted = [False] * len(self._names)
        self._num_missing = [len(bucket.slots) for bucket in self._buckets]
        self._is_acquired = [False] * len(self._buckets)
        self._waiting_params: list[list[int]] = [[] for _ in self._buckets]
        self._is_last_backward, self.num_launched = False, 0

    def mark_last_backward(self) -> None:
        """The next backward is the round's last: buckets may be launched as they become complete."""
        self._is_last_backward = True

    @torch.no_grad()
    def copy_referenced_views(self) -> None:
        """Before slots are written: if the user still holds a view that was in `.grad`, turn it into a copy.

        torch's own gradients behave like that: where `.grad` was None they are new tensors.
        """
        for index in range(len(self.views)):
            if sys.getrefcount(self.views[index]) == self._num_view_refs[index]:
                continue
            view = self.views[index]
            if self._parameters[self._names[index]].grad is not view:
                self.views[index] = view.view(view.shape)
                view.data = view.clone()

    def on_grad(self, parameter: Tensor, param_index: int) -> None:
        """Store a gradient that autograd has accumulated; in the last backward, count it."""
        if not self.is_enabled:
            return
        gradient = parameter.grad
        if gradient is None:
            raise_grad_cleared(self._names[param_index])
        if gradient.requires_grad:
            raise_grad_has_graph(self._names[param_index])
        if gradient is self.views[param_index]:  # autograd has added to the slot in place
            self._written[param_index] = True
        else:
            self._store(param_index)
        self.reached[param_index] = True
        if self._is_last_backward:
            self._count_down(param_index)

    def _store(self, param_index: int) -> None:
        """Copy a gradient into its slot; if the buffer is not free yet, leave it in `.grad` until it is."""
        bucket = self._bucket_of[param_index]
        if not self._is_acquired[bucket]:
            if not self._can_acquire(bucket):
                self._waiting_params[bucket].append(param_index)
                return
            self._acquire(bucket)
        self._copy_to_slot(param_index)

    def _can_acquire(self, bucket: int) -> bool:
        previous = self._prev_in_buffer[bucket]
        if previous is not None and self._launch_index[previous] >= self.num_launched:
            return False
        return self._waits_in_hooks or self._reducer.can_acquire_buffer(bucket, self.grad_factor())

    def _acquire(self, bucket: int) -> None:
        if not self._is_acquired[bucket]:
            self._reducer.acquire_buffer(bucket, self.grad_factor())
            self._is_acquired[bucket] = True
            # If buckets share the buffer, another one's gradient may be in the padding, and a norm would count it.
            self._paddings[bucket].zero_()
            for index in self._waiting_params[bucket]:
                self._copy_to_slot(index)
            self._waiting_params[bucket].clear()

    def _copy_to_slot(self, param_index: int) -> None:
        """Copy a gradient into its slot, or add it to those of earlier microbatches."""
        parameter, view = self._parameters[self._names[param_index]], self.views[param_index]
        gradient = parameter.grad
        assert gradient is not None
        check_dense(gradient, self._names[param_index])
        if self._written[param_index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._written[param_index] = True
        # Free what autograd allocated before it makes the next gradient.
        parameter.grad = None

    def _count_down(self, param_index: int) -> None:
        if self._counted[param_index]:
            # The bucket may be launched already: this gradient would be lost, or added after the sum.
            raise_second_grad(self._names[param_index])
        self._counted[param_index] = True
        bucket = self._bucket_of[param_index]
        self._num_missing[bucket] -= 1
        if self._num_missing[bucket] == 0:
            if self._round == 0:
                self.completion_order.append(bucket)
            self.recorder.instant(self._reduction_index(bucket), READY_EVENT)
            self._launch_ready(wait=self._waits_in_hooks)

    def _launch_ready(self, *, wait: bool) -> None:
        # In program order, not in ready order: ranks differ in readiness, and collectives must not.
        while (
            self.num_launched < len(self._launch_order)
            and self._num_missing[self._launch_order[self.num_launched]] == 0
        ):
            bucket = self._launch_order[self.num_launched]
            if not (wait or self._reducer.can_acquire_buffer(bucket, self.grad_factor())):
                return
            self._acquire(bucket)
            self._zero_unwritten(bucket)
            self.recorder.instant(self._reduction_index(bucket), LAUNCHED_EVENT)
            self._reducer.reduce_async(bucket, self._reduction_index(bucket), self.grad_factor())
            self.num_launched += 1
            self.on_launch()

    def _reduction_index(self, bucket: int) -> int:
        """The index of a bucket's reduction in the program."""
        return self._round * len(self._buckets) + bucket

    def _zero_unwritten(self, bucket: int) -> None:
        first = self._first_param[bucket]
        for index in range(first, first + len(self._buckets[bucket].slots)):
            if not self._written[index]:
                self.views[index].zero_()

    def drop_grads(self) -> None:
        """Drop what is in `.grad`: backwards outside of steps have left it there."""
        for name in self._names:
            self._parameters[name].grad = None

    def store_leftover_grads(self) -> None:
        """Store what earlier backwards left in `.grad` of parameters that the last one did not reach."""
        for index, view in enumerate(self.views):
            gradient = self._parameters[self._names[index]].grad
            if gradient is None or self._counted[index]:
                continue
            if gradient is view:
                self._written[index] = True
            else:
                self._store(index)
            self.reached[index] = True

    def finish_round(self) -> None:
        """End a round: zero unwritten slots and launch all remaining buckets. Does not wait for the sums."""
        if self._round == 0:
            self.completion_order += [bucket.index for bucket in self._buckets if self._num_missing[bucket.index]]
        self._num_missing = [0] * len(self._buckets)
        self._launch_ready(wait=True)

    def first_reached(self, bucket: int) -> str | None:
        """The name of the bucket's first parameter that a backward of this step has reached; None if there is none."""
        first = self._first_param[bucket]
        indices = range(first, first + len(self._buckets[bucket].slots))
        return next((self._names[index] for index in indices if self.reached[index]), None)

    def check_all_reached(self) -> None:
        """Raise TrainingError naming the parameters that no backward of the step has reached."""
        if not self._allow_unused:
            check_all_reached(self._names, self.reached, map(self._parameters.__getitem__, self._names))

    def local_grads(self, bucket: int) -> list[Tensor]:
        """This rank's shard of a bucket's sum, for the norm; waits for the reduction."""
        self._reducer.reduce_shard(bucket)
        return [self._reducer.grad_shard(bucket).flat]

    def detach_grads(self) -> None:
        """No-op: sums outlive the step in the reducer's buffers. (`UnbucketedGrads` empties `.grad` here.)"""

    def restore_grads(self, bucket: int) -> None:
        """No-op: sums already rest in the slots. (`UnbucketedGrads` restores `.grad` here.)"""

    def free_grads(self, bucket: int) -> None:
        """No-op: the reducer owns the slots, and knows when they may be written again."""
