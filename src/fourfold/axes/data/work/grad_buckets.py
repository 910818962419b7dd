"""Gradient buckets: gradients are copied from autograd into slots, and complete buckets are reduced.

slot      a parameter's place in the gradient buffer of its bucket, [start, stop)
complete  a bucket whose parameters all have their gradient of the round; it may be launched
waiting   a gradient that stays in `.grad` because the buffer still holds the gradient of another bucket
Law: when a bucket is launched, each of its slots is written or zero, and no rank reads what the buffer held before.
Law: a gradient is copied once, from where autograd allocates it, and that memory is freed at once.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.work.gradients import Countdown, check_all_reached, check_untouched
from fourfold.comm.memory_order import shaped
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import GradReducer
from fourfold.torch_kit.grad_hooks import (
    check_dense,
    check_not_cleared,
    raise_grad_has_graph,
    raise_grad_written,
    raise_second_grad,
)
from fourfold.words.ranges import rest_of_range
from fourfold.words.trace_events import DONE_EVENT, LAUNCHED_EVENT, READY_EVENT

# ---- gradient slots ------------------------------------------------------------------------------------------------


class GradSlots:
    """The slots of all parameters, numbered by bucket and slot."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], buffers: Sequence[Tensor]
    ) -> None:
        """`buffers` are the gradient buffers by bucket."""
        self.names = [slot.name for bucket in buckets for slot in bucket.slots]
        self.parameters = [parameters[name] for name in self.names]
        self._paddings = [buffers[bucket.index][bucket.slots[-1].stop :] for bucket in buckets]
        self._first_param = list(itertools.accumulate((len(bucket.slots) for bucket in buckets), initial=0))
        self._flats = [buffers[bucket.index][slot.start : slot.stop] for bucket in buckets for slot in bucket.slots]
        self.views = [shaped(flat, parameter) for flat, parameter in zip(self._flats, self.parameters, strict=True)]
        # Counted with the same expression as in `copy_referenced_views`, which adds references of its own.
        self._num_view_refs = [sys.getrefcount(self.views[index]) for index in range(len(self.views))]
        self.written = [False] * len(self.names)
        """By parameter: whether its slot holds a gradient of this round."""

    def begin_round(self) -> None:
        """Begin a round: no slot is written."""
        self.written = [False] * len(self.names)

    def store(self, param_index: int) -> None:
        """Copy a gradient into its slot, or add it to those of earlier microbatches."""
        parameter, view = self.parameters[param_index], self.views[param_index]
        gradient = parameter.grad
        assert gradient is not None
        check_dense(gradient, self.names[param_index])
        if self.written[param_index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.written[param_index] = True
        # Free what autograd allocated before it makes the next gradient.
        parameter.grad = None

    def zero_padding(self, bucket: int) -> None:
        """Zero what lies behind the last slot: another bucket's gradient may be there, and a norm would count it."""
        self._paddings[bucket].zero_()

    def zero_unwritten(self, bucket: int) -> None:
        """Zero the slots of a bucket that hold no gradient."""
        for index in range(self._first_param[bucket], self._first_param[bucket + 1]):
            if not self.written[index]:
                self.views[index].zero_()

    @torch.no_grad()
    def copy_referenced_views(self) -> None:
        """Before slots are written: if the user still holds a view that was in `.grad`, turn it into a copy.

        torch's own gradients behave like that: where `.grad` was None they are new tensors. A view that the user has
        given other memory (`p.grad.data = …`, `model.float()`) is one already.
        """
        for index in range(len(self.views)):
            if self.views[index].data_ptr() != self._flats[index].data_ptr():
                self.views[index] = shaped(self._flats[index], self.parameters[index])
                continue
            if sys.getrefcount(self.views[index]) == self._num_view_refs[index]:
                continue
            view = self.views[index]
            if self.parameters[index].grad is not view:
                self.views[index] = view.view(view.shape)
                view.data = view.clone()

    def drop_grads(self) -> None:
        """Drop what is in `.grad`."""
        for parameter in self.parameters:
            parameter.grad = None


# ---- gradient buckets ----------------------------------------------------------------------------------------------


class GradBuckets:
    """The gradients of a step in the reducer's buffers; see `Gradients`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        reducer: GradReducer,
        meter: CommMeter,
        *,
        allow_unused: bool,
        may_block_in_backward: bool = True,
        uncounted: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        """Gradients that no backward has written yet.

        may_block_in_backward  whether hooks may wait for a buffer that a reduction still uses. Not if ranks wait for
                               each other in backward otherwise: the rank that must end the reduction may itself wait
                               for something that this rank has not begun
        uncounted              by bucket: the elements [start, stop) whose squares another tensor rank adds to the norm;
                               empty: none
        """
        self._uncounted = uncounted
        self._buckets, self._reducer, self._meter = buckets, reducer, meter
        self._allow_unused, self._may_block = allow_unused, may_block_in_backward
        self.countdown = Countdown(buckets)
        self.slots = GradSlots(parameters, buckets, reducer.grad_buffers)
        self.set_launch_order(self.countdown.launch_order)
        self.begin_step()

    def set_launch_order(self, order: Sequence[int]) -> None:
        """Fix the order of the reductions."""
        self.countdown.launch_order = list(order)

    def begin_step(self) -> None:
        """Begin a step: no slot is written, no bucket launched."""
        self.countdown.begin_step()
        self._begin_buffers()

    def begin_round(self, buckets: Sequence[int], number: int) -> None:
        """Begin a round of reductions."""
        self.countdown.begin_round(buckets, number)
        self._begin_buffers()

    def _begin_buffers(self) -> None:
        # By bucket: the bucket that uses the same buffer before it in the round, as a position in its order.
        last_user: dict[int, int] = {}
        self._previous_user: dict[int, int] = {}
        for position, bucket in enumerate(self.countdown.round_order):
            buffer = self._reducer.buffer_indices[bucket]
            if buffer in last_user:
                self._previous_user[bucket] = last_user[buffer]
            last_user[buffer] = position
        self.slots.begin_round()
        self._is_acquired = [False] * len(self._buckets)
        self._waiting_params: list[set[int]] = [set() for _ in self._buckets]

    def store(self, param_index: int) -> bool:
        """Take a gradient that autograd has accumulated. Returns whether a bucket is complete now."""
        gradient = self.slots.parameters[param_index].grad
        if gradient is None:
            check_not_cleared(self.slots.parameters[param_index], self.slots.names[param_index])
            return False
        if gradient.requires_grad:
            raise_grad_has_graph(self.slots.names[param_index])
        self._take(param_index, gradient)
        countdown = self.countdown
        if not countdown.is_last_backward:
            return False
        if countdown.counted[param_index]:
            # The bucket may be launched already: this gradient would be lost, or added after the sum.
            raise_second_grad(self.slots.names[param_index])
        if not countdown.count(param_index):
            return False
        bucket = countdown.bucket_of[param_index]
        self._meter.recorder.instant(countdown.reduction_index(bucket), READY_EVENT)
        return True

    def _take(self, param_index: int, gradient: Tensor) -> None:
        """Copy a gradient into its slot; if the buffer is not free yet, leave it in `.grad` until it is."""
        self.countdown.reached[param_index] = True
        if gradient is self.slots.views[param_index]:  # autograd has added to the slot in place
            self.slots.written[param_index] = True
            return
        bucket = self.countdown.bucket_of[param_index]
        if self._is_acquired[bucket]:
            self.slots.store(param_index)
            return
        # It may wait already, of an earlier microbatch: then autograd has added to it.
        self._waiting_params[bucket].add(param_index)
        if self._can_acquire(bucket):
            self._acquire(bucket)

    def _can_acquire(self, bucket: int) -> bool:
        if self._previous_user.get(bucket, -1) >= self.countdown.num_launched:
            return False
        return self._may_block or self._reducer.can_acquire_buffer(bucket, None)

    def _acquire(self, bucket: int) -> None:
        if not self._is_acquired[bucket]:
            self._reducer.acquire_buffer(bucket, None)
            self._is_acquired[bucket] = True
            self.slots.zero_padding(bucket)
            for index in self._waiting_params[bucket]:
                self.slots.store(index)
            self._waiting_params[bucket].clear()

    def launch_next(self, factor: float | None, *, may_wait: bool) -> int | None:
        """Launch the next bucket in program order if it is complete. Returns it, or None."""
        # In program order, not in ready order: ranks differ in readiness, and collectives must not.
        bucket = self.countdown.next_complete()
        if bucket is None:
            return None
        if not (may_wait or self._may_block or self._reducer.can_acquire_buffer(bucket, factor)):
            return None
        self._acquire(bucket)
        self.slots.zero_unwritten(bucket)
        index = self.countdown.reduction_index(bucket)
        self._meter.recorder.instant(index, LAUNCHED_EVENT)
        self._reducer.reduce_async(bucket, index, factor)
        self.countdown.num_launched += 1
        return bucket

    def record_done(self, bucket: int) -> None:
        """Record that a bucket's sum is there."""
        self._meter.recorder.instant(bucket, DONE_EVENT)

    def store_leftover_grads(self) -> None:
        """Store what earlier backwards left in `.grad` of parameters that the last one did not reach."""
        for index, parameter in enumerate(self.slots.parameters):
            if parameter.grad is not None and not self.countdown.counted[index]:
                self._take(index, parameter.grad)

    def check_taken(self) -> None:
        """Raise TrainingError naming a parameter whose `.grad` was written after its gradient was taken from there."""
        slots, countdown = self.slots, self.countdown
        for index, parameter in enumerate(slots.parameters):
            gradient = parameter.grad if countdown.counted[index] else None
            is_ours = gradient is slots.views[index] or index in self._waiting_params[countdown.bucket_of[index]]
            if gradient is not None and not is_ours:
                raise_grad_written(slots.names[index])

    def check_untouched(self) -> None:
        """Raise TrainingError naming a parameter that has a gradient before the first backward of the step."""
        check_untouched(self.countdown, self.slots.parameters)

    def check_all_reached(self, buckets: Sequence[int]) -> None:
        """Raise TrainingError naming the parameters of these buckets that no backward of the step has reached."""
        for index, parameter in enumerate(self.slots.parameters):
            if self.countdown.reached[index] or self.countdown.bucket_of[index] not in buckets:
                continue
            if parameter.grad is not None:  # of a backward within forward
                self._take(index, parameter.grad)
        if not self._allow_unused:
            check_all_reached(self.countdown, buckets, self.slots.parameters)

    def local_grads(self, bucket: int) -> list[Tensor]:
        """This rank's shard of a bucket's sum, for the norm; the reduction has ended."""
        self._reducer.reduce_shard(bucket)
        start, stop, flat = self._reducer.grad_shard(bucket)
        if not self._uncounted:
            return [flat]
        counted = rest_of_range(start, stop, self._uncounted[bucket])
        return [flat[a - start : b - start] for a, b in counted] or [flat[:0]]

    def drop_grads(self) -> None:
        """Drop what is in `.grad`: backwards outside of steps have left it there."""
        self.slots.drop_grads()

    def detach_grads(self) -> None:
        """No-op: sums outlive the step in the reducer's buffers. (`UnbucketedGrads` empties `.grad` here.)"""

    def restore_grads(self, bucket: int) -> None:
        """No-op: sums already rest in the slots. (`UnbucketedGrads` restores `.grad` here.)"""

    def free_grads(self, bucket: int) -> None:
        """No-op: the reducer owns the slots, and knows when they may be written again."""
