"""Gradients of a stage, wherever they lie: in buckets that ranks reduce, or where autograd leaves them.

countdown  number of a bucket's parameters without a gradient in the round's last backward; at 0 the bucket is complete
round      the backwards between two sets of reductions of a bucket: those of a whole step, or one if gradients rest
           split, of its stage; a round that is begun for some buckets launches these only
launch     the start of a bucket's reduction, in program order (the same on every rank), while backward continues
Law: buckets are launched in program order, whatever the order in which they become complete.

slot       a parameter's place in the gradient buffer of its bucket, [start, stop)
waiting    a gradient that stays in `.grad` because the buffer still holds the gradient of another bucket
Law: when a bucket is launched, each of its slots is written or zero, and no rank reads what the buffer held before.
Law: a gradient is copied once, from where autograd allocates it, and that memory is freed at once.

unbucketed those of a rank that trains its weights alone
earlier    the sum of a step's microbatches so far, of a parameter with hooks of the user: they see one microbatch's
           gradient, which they may scale or clamp
Law: a step computes with unbucketed gradients what it would compute with buckets, but copies nothing and has no slots.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.memory_order import shaped
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import GradReducer
from fourfold.comm.reduce.scalars import ScalarReducer
from fourfold.optim.flat_optimizer import UpdateSlice
from fourfold.torch_kit.grad_hooks import (
    check_dense,
    check_not_cleared,
    has_user_hooks,
    raise_grad_has_graph,
    raise_grad_written,
    raise_second_grad,
)
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import USED_PARAMS
from fourfold.words.ranges import rest_of_range
from fourfold.words.trace_events import DONE_EVENT, LAUNCHED_EVENT, READY_EVENT

# ---- countdown -------------------------------------------------------------------------------------------------------


class Countdown:
    """The gradients that are still missing, by bucket. Parameters are numbered by bucket and slot."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.names = [slot.name for bucket in buckets for slot in bucket.slots]
        self.bucket_of = [bucket.index for bucket in buckets for _ in bucket.slots]
        self._sizes = [len(bucket.slots) for bucket in buckets]
        self.launch_order: Sequence[int] = list(range(len(buckets)))
        """The order of the reductions."""
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: no bucket is complete or launched."""
        self.reached = [False] * len(self.names)
        """By parameter: whether a backward of this step has reached it."""
        self.completion_order: list[int] = []
        """The order in which this rank's buckets became complete in the first round of this step."""
        self.counted = [False] * len(self.names)
        self._num_missing = list(self._sizes)
        self._rounds = [0] * len(self._sizes)
        """By bucket."""
        self.begin_round(range(len(self._sizes)), 0)

    def begin_round(self, buckets: Sequence[int], number: int) -> None:
        """Begin a round of reductions of these buckets, which number this is, from 0.

        All that were in the round before have been launched.
        """
        own = set(buckets)
        self.round_order = [bucket for bucket in self.launch_order if bucket in own]
        """The order of the round's reductions."""
        for bucket in buckets:
            self._rounds[bucket] = number
            self._num_missing[bucket] = self._sizes[bucket]
        for index, bucket in enumerate(self.bucket_of):
            self.counted[index] = self.counted[index] and bucket not in own
        self.num_launched = 0
        self.is_last_backward = False
        """Whether the current backward is the round's last: buckets may be launched as they become complete."""

    def count(self, param_index: int) -> bool:
        """Count a gradient of the round's last backward. Returns whether it completes its bucket."""
        self.counted[param_index] = True
        bucket = self.bucket_of[param_index]
        self._num_missing[bucket] -= 1
        if self._num_missing[bucket]:
            return False
        if self._rounds[bucket] == 0:
            self.completion_order.append(bucket)
        return True

    def complete(self, buckets: Sequence[int]) -> None:
        """The round has no more gradients of these buckets: they are complete."""
        missing = [bucket for bucket in buckets if self._num_missing[bucket]]
        self.completion_order += [bucket for bucket in missing if self._rounds[bucket] == 0]
        for bucket in missing:
            self._num_missing[bucket] = 0

    def next_complete(self) -> int | None:
        """The bucket to launch next, if it is complete."""
        if self.num_launched == len(self.round_order):
            return None
        bucket = self.round_order[self.num_launched]
        return None if self._num_missing[bucket] else bucket

    def is_launched(self, bucket: int) -> bool:
        """Whether a bucket has been launched in this round."""
        return bucket in self.launched

    @property
    def launched(self) -> Sequence[int]:
        """The buckets that have been launched in this round, in order."""
        return self.round_order[: self.num_launched]

    def reduction_index(self, bucket: int) -> int:
        """The index of the bucket's reduction in the program, in this round."""
        return self._rounds[bucket] * len(self._sizes) + bucket

    def first_reached(self, bucket: int) -> str | None:
        """The name of the bucket's first parameter that a backward of this step has reached; None if there is none."""
        first = sum(self._sizes[:bucket])
        indices = range(first, first + self._sizes[bucket])
        return next((self.names[index] for index in indices if self.reached[index]), None)


# ---- what both kinds have in common ----------------------------------------------------------------------------------


class _Gradients:
    """The gradients of parameters that are numbered by bucket and slot, and which of the buckets are complete."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], meter: CommMeter, *, allow_unused: bool
    ) -> None:
        self.countdown = Countdown(buckets)
        """Which buckets are complete and launched."""
        self.parameters = [parameters[name] for name in self.countdown.names]
        self._meter, self._allow_unused = meter, allow_unused

    def set_launch_order(self, order: Sequence[int]) -> None:
        """Fix the order of the reductions."""
        self.countdown.launch_order = list(order)

    def record_done(self, bucket: int) -> None:
        """Record that a bucket's sum is there."""
        self._meter.recorder.instant(bucket, DONE_EVENT)

    def check_untouched(self) -> None:
        """Raise TrainingError naming a parameter that has a gradient before the first backward of the step."""
        if any(self.countdown.reached):
            return
        rows = zip(self.countdown.names, self.parameters, strict=True)
        if name := next((name for name, parameter in rows if parameter.grad is not None), None):
            got = f"a backward() within forward, which gives {name} a gradient, where the batch is split"
            need = "one backward for each part of the batch: that of the loss, by which Fourfold divides"
            raise TrainingError(
                Problem(got, need, "the loss of the layer returned by forward, and added by the loss function")
            )

    def _check_all_reached(self, buckets: Sequence[int]) -> None:
        """Raise TrainingError naming the parameters of these buckets that no backward of the step has reached."""
        if self._allow_unused:
            return
        need = "a gradient for every trainable parameter"
        # A reentrant checkpoint without an input that requires a gradient gives its parameters none.
        attempt = 'unused = "allow", or requires_grad_(False), or use_reentrant=False if it is in a checkpoint'
        attempt_frozen = 'unused = "allow", which lets parameters be frozen and unfrozen during training'
        problems = []
        countdown = self.countdown
        rows = zip(countdown.names, countdown.bucket_of, countdown.reached, self.parameters, strict=True)
        for name, bucket, was_reached, parameter in rows:
            if bucket not in buckets:
                continue
            if not was_reached and parameter.requires_grad:
                problems.append(Problem(f"parameter {name} got no gradient", need, attempt))
            elif not was_reached:
                got = f"parameter {name} got no gradient: it was frozen after the step was built"
                problems.append(Problem(got, need, attempt_frozen))
        if problems:
            raise TrainingError(problems)

    def drop_grads(self) -> None:
        """Drop what is in `.grad`: backwards outside of steps have left it there."""
        for parameter in self.parameters:
            parameter.grad = None


# ---- gradient slots ------------------------------------------------------------------------------------------------


class GradSlots:
    """The slots of all parameters, numbered by bucket and slot."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], buckets: Sequence[Bucket], buffers: Sequence[Tensor]
    ) -> None:
        """`buffers` are the gradient buffers by bucket."""
        self._names = [slot.name for bucket in buckets for slot in bucket.slots]
        self._parameters = parameters
        self._paddings = [buffers[bucket.index][bucket.slots[-1].stop :] for bucket in buckets]
        self._first_param = list(itertools.accumulate((len(bucket.slots) for bucket in buckets), initial=0))
        self._flats = [buffers[bucket.index][slot.start : slot.stop] for bucket in buckets for slot in bucket.slots]
        self.views = [shaped(flat, parameter) for flat, parameter in zip(self._flats, self._parameters, strict=True)]
        # Counted with the same expression as in `copy_referenced_views`, which adds references of its own.
        self._num_view_refs = [sys.getrefcount(self.views[index]) for index in range(len(self.views))]
        self.written = [False] * len(self._names)
        """By parameter: whether its slot holds a gradient of this round."""

    def begin_round(self) -> None:
        """Begin a round: no slot is written."""
        self.written = [False] * len(self._names)

    def store(self, param_index: int) -> None:
        """Copy a gradient into its slot, or add it to those of earlier microbatches."""
        parameter, view = self._parameters[param_index], self.views[param_index]
        gradient = parameter.grad
        assert gradient is not None
        check_dense(gradient, self._names[param_index])
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
                self.views[index] = shaped(self._flats[index], self._parameters[index])
                continue
            if sys.getrefcount(self.views[index]) == self._num_view_refs[index]:
                continue
            view = self.views[index]
            if self._parameters[index].grad is not view:
                self.views[index] = view.view(view.shape)
                view.data = view.clone()


# ---- gradient buckets ----------------------------------------------------------------------------------------------


class GradBuckets(_Gradients):
    """The gradients of a step in the reducer's buffers."""

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
        super().__init__(parameters, buckets, meter, allow_unused=allow_unused)
        self._buckets, self._reducer, self._uncounted = buckets, reducer, uncounted
        self._may_block = may_block_in_backward
        self.slots = GradSlots(self.parameters, buckets, reducer.grad_buffers)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: no slot is written, no bucket launched."""
        self.countdown.begin_step()
        self._begin_buffers()

    def begin_round(self, buckets: Sequence[int], number: int) -> None:
        """Begin a round of reductions: see `Countdown`."""
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
        gradient = self.parameters[param_index].grad
        if gradient is None:
            check_not_cleared(self.parameters[param_index], self.countdown.names[param_index])
            return False
        if gradient.requires_grad:
            raise_grad_has_graph(self.countdown.names[param_index])
        self._take(param_index, gradient)
        countdown = self.countdown
        if not countdown.is_last_backward:
            return False
        if countdown.counted[param_index]:
            # The bucket may be launched already: this gradient would be lost, or added after the sum.
            raise_second_grad(self.countdown.names[param_index])
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
        """Launch the next bucket in program order if it is complete. Returns it, or None.

        factor    what the sums are multiplied by; None while it is not known
        may_wait  whether to wait for the bucket's buffer, in backward only where that is harmless
        """
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

    def store_leftover_grads(self) -> None:
        """Store what earlier backwards left in `.grad` of parameters that the last one did not reach."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not self.countdown.counted[index]:
                self._take(index, parameter.grad)

    def check_taken(self) -> None:
        """Raise TrainingError naming a parameter whose `.grad` was written after its gradient was taken from there."""
        slots, countdown = self.slots, self.countdown
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad if countdown.counted[index] else None
            is_ours = gradient is slots.views[index] or index in self._waiting_params[countdown.bucket_of[index]]
            if gradient is not None and not is_ours:
                raise_grad_written(countdown.names[index])

    def check_all_reached(self, buckets: Sequence[int]) -> None:
        """Raise TrainingError naming the parameters of these buckets that no backward of the step has reached.

        What a backward within forward has given them is their gradient.
        """
        for index, parameter in enumerate(self.parameters):
            if self.countdown.reached[index] or self.countdown.bucket_of[index] not in buckets:
                continue
            if parameter.grad is not None:  # of a backward within forward
                self._take(index, parameter.grad)
        self._check_all_reached(buckets)

    def local_grads(self, bucket: int) -> list[Tensor]:
        """This rank's shard of a bucket's sum, for the norm; the reduction has ended."""
        self._reducer.reduce_shard(bucket)
        start, stop, flat = self._reducer.grad_shard(bucket)
        if not self._uncounted:
            return [flat]
        counted = rest_of_range(start, stop, self._uncounted[bucket])
        return [flat[a - start : b - start] for a, b in counted] or [flat[:0]]

    def detach_grads(self) -> None:
        """The update comes after the step: keep gradients where the user does not reach them. Sums are there already,
        in the reducer's buffers, as they are for `restore_grads` and `free_grads`."""

    def restore_grads(self, bucket: int) -> None:
        """Put a bucket's detached gradients where the update reads them."""

    def free_grads(self, bucket: int) -> None:
        """Free a bucket's gradients after their update. The reducer knows when its slots may be written again."""


# ---- unbucketed gradients ------------------------------------------------------------------------------------------


class UnbucketedGrads(_Gradients):
    """The gradients of a step of a rank alone. A step has one round."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        meter: CommMeter,
        *,
        allow_unused: bool,
    ) -> None:
        super().__init__(parameters, buckets, meter, allow_unused=allow_unused)
        self._by_bucket = [[parameters[slot.name] for slot in bucket.slots] for bucket in buckets]
        self._detached_grads: list[list[Tensor | None]] = [[] for _ in buckets]
        self._earlier: dict[int, Tensor] = {}

    def begin_step(self) -> None:
        """Begin a step."""
        self._earlier = {}
        self.countdown.begin_step()

    def begin_round(self, buckets: Sequence[int], number: int) -> None:
        """Begin a round."""
        self.countdown.begin_round(buckets, number)

    def store(self, param_index: int) -> bool:
        """Check a gradient that autograd has accumulated. Returns whether a bucket is complete now."""
        countdown, parameter = self.countdown, self.parameters[param_index]
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
        earlier, parameter = self._earlier.pop(param_index, None), self.parameters[param_index]
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def launch_next(self, factor: float | None, *, may_wait: bool) -> int | None:
        """Count the next bucket in program order as launched if it is complete. Returns it, or None."""
        bucket = self.countdown.next_complete()
        if bucket is not None:
            self._meter.recorder.instant(bucket, LAUNCHED_EVENT)
            self.countdown.num_launched += 1
        return bucket

    def check_all_reached(self, buckets: Sequence[int]) -> None:
        """Raise TrainingError naming the parameters of these buckets that no backward of the step has reached."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and self.countdown.bucket_of[index] in buckets:
                self.countdown.reached[index] = True  # perhaps by a backward within forward
        for param_index in [index for index in self._earlier if self.countdown.bucket_of[index] in buckets]:
            self._add_earlier(param_index)  # the last backward has not reached it
        self._check_all_reached(buckets)

    def local_grads(self, bucket: int) -> list[Tensor]:
        """The gradients of a bucket, for the norm; no copies."""
        return [parameter.grad for parameter in self._by_bucket[bucket] if parameter.grad is not None]

    def detach_grads(self) -> None:
        """Move the gradients out of `.grad`, which the user may clear: they are used after the step."""
        self._detached_grads = [[parameter.grad for parameter in members] for members in self._by_bucket]
        self.drop_grads()

    def restore_grads(self, bucket: int) -> None:
        """Put a bucket's gradients back into `.grad`, where the update reads them."""
        for parameter, gradient in zip(self._by_bucket[bucket], self._detached_grads[bucket], strict=True):
            parameter.grad = gradient
        self._detached_grads[bucket] = []

    def free_grads(self, bucket: int) -> None:
        """Free a bucket's gradients after their update: their memory serves the next ones."""
        for parameter in self._by_bucket[bucket]:
            parameter.grad = None

    def update_slices(self, weights: Sequence[Tensor], buckets: Sequence[Bucket]) -> list[list[UpdateSlice]]:
        """The slices that the update works on, by bucket: one for each parameter."""
        return [
            [
                UpdateSlice(slot.start, slot.stop, weight[slot.start : slot.stop], parameter, number)
                for number, (slot, parameter) in enumerate(zip(bucket.slots, members, strict=True))
            ]
            for bucket, members, weight in zip(buckets, self._by_bucket, weights, strict=True)
        ]


# ---- launches ------------------------------------------------------------------------------------------------------


Gradients = GradBuckets | UnbucketedGrads
"""The gradients of a stage's parameters, by bucket."""


class LaunchSink:
    """Takes gradients from autograd, and launches the buckets that they complete: `launch_next` launches the next."""

    def __init__(self, gradients: Gradients, launch_next: Callable[[], int | None]) -> None:
        self._gradients, self._launch_next = gradients, launch_next

    def on_grad(self, param_index: int) -> None:
        if self._gradients.store(param_index):
            while self._launch_next() is not None:
                pass


def launch_complete(gradients: Gradients, factor: float | None) -> None:
    """Launch the buckets that are complete, up to the first that is not. Does not wait for the sums."""
    while gradients.launch_next(factor, may_wait=True) is not None:
        pass


def num_ranks_with_grad(countdown: Countdown, scalars: ScalarReducer) -> Sequence[float]:
    """By parameter: on how many ranks it has a gradient. Collective."""
    scalars.all_reduce_async(USED_PARAMS, torch.tensor(countdown.reached, dtype=torch.float64))
    return scalars.wait(USED_PARAMS)
