"""The data axis, done: gradients go from autograd into slots, from slots into sums.

slot       a parameter's stretch of its bucket's gradient flat
countdown  parameters of a bucket that have no gradient yet in this round's last backward; zero permits the reduction
launch     reductions begin in program order, on every rank the same, while backward goes on
round      what lies between two rounds of reductions: a whole step, or one backward where gradients rest split
held       a gradient that stays in `.grad` because another bucket's gradient still needs the memory of its slot
Law: a round is sealed with every slot written or known to be unused, and every bucket launched.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from fourfold.parts import memory
from fourfold.parts.comm.reduce.protocol import BucketSlice, Transport
from fourfold.parts.data.grad_hooks import register_last_hook
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.optim.flat_optimizer import UpdateSlice
from fourfold.parts.optim.master_weights import MasterWeights
from fourfold.plan.data.buckets import Bucket, ParamSpec
from fourfold.words.errors import Problem, TaskError, TrainingError
from fourfold.words.trace_events import LAUNCHED_EVENT, NULL_RECORDER, READY_EVENT


def param_specs(parameters: Mapping[str, nn.Parameter], groups: Mapping[str, int]) -> list[ParamSpec]:
    """What bucket arithmetic must know of the trainable parameters, in order of definition."""
    return [
        ParamSpec(name, p.numel(), str(p.dtype).removeprefix("torch."), p.element_size(), groups.get(name, 0))
        for name, p in parameters.items()
    ]


def bucket_dtype(bucket: Bucket) -> torch.dtype:
    return getattr(torch, bucket.dtype)


@torch.no_grad()
def flatten_params(
    parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], transport: Transport
) -> Sequence[Tensor]:
    """Move the weights into one flat per bucket; each parameter becomes a view of its slot. Returns the flats."""
    flats = transport.shared_weights
    if flats is None:
        devices = [parameters[bucket.slots[0].name].device for bucket in buckets]
        flats = [memory.allocate_private(b.size, bucket_dtype(b), d) for b, d in zip(buckets, devices, strict=True)]
    for bucket, flat in zip(buckets, flats, strict=True):
        for slot in bucket.slots:
            parameter = parameters[slot.name]
            place = flat[slot.start : slot.stop].view(parameter.shape)
            if transport.is_writer:
                place.copy_(parameter)
            parameter.data = place
    return flats


def noop() -> None:
    """For those who need not be told."""


class GradSink(Protocol):
    """Who takes gradients from autograd."""

    def on_grad(self, parameter: Tensor, param_index: int) -> None: ...


def weak_grad_hook(sink: GradSink, param_index: int) -> Callable[[Tensor], None]:
    """A hook that has `taker` take the gradient of its `number`-th parameter."""
    # Not a reference: the garbage collector does not see through a parameter's hooks, and all of a step, its
    # shared memory too, would stay as long as the process.
    mine = weakref.ref(sink)

    def hook(parameter: Tensor) -> None:
        living = mine()
        if living is not None:
            with untracked_access():
                living.on_grad(parameter, param_index)

    return hook


def raise_grad_cleared(name: str) -> NoReturn:
    """Raise TaskError for a gradient that is gone before it could be taken."""
    got = f"a hook has set .grad of {name} to None"
    need = "the gradient left in .grad: the update takes it from there, after all hooks"
    raise TaskError(Problem(got, need, "a hook that reads .grad, or changes it"))


def raise_grad_has_graph(name: str) -> NoReturn:
    """Raise TaskError for a gradient with a graph: what is reduced has none, and its derivative would be left out."""
    got = f"backward(create_graph=True), which gives .grad of {name} a graph of its own"
    need = "gradients that are numbers: a mean over ranks has no graph"
    attempt = "torch.autograd.grad(loss, parameters, create_graph=True) in the loss, then backward()"
    raise TaskError(Problem(got, need, attempt))


def check_dense(gradient: Tensor, name: str) -> None:
    """Raise TaskError for a sparse gradient."""
    if gradient.layout is not torch.strided:
        raise TaskError(Problem(f"{name} has a sparse gradient", "dense gradients", "sparse=False"))


def second_grad_problem(name: str) -> Problem:
    """What is wrong with a second gradient of a parameter in one backward."""
    got = f"two gradients of {name} in one backward (a reentrant checkpoint around its layer?)"
    return Problem(got, "one, with all uses added up", "checkpoint(…, use_reentrant=False)")


def raise_second_grad(name: str) -> NoReturn:
    """Raise TaskError for the second gradient of a parameter in one backward."""
    raise TaskError(second_grad_problem(name))


def check_all_reached(names: Sequence[str], reached: Sequence[bool], parameters: Iterable[nn.Parameter]) -> None:
    """Raise TrainingError naming the parameters that no backward of the step has reached."""
    need = "a gradient for every trainable parameter"
    # A reentrant checkpoint none of whose inputs wants a gradient gives its parameters none.
    attempt = 'unused = "allow", or requires_grad_(False), or use_reentrant=False if it is in a checkpoint'
    thawed = 'unused = "allow", with which parameters may be frozen and thawed while training goes on'
    problems = []
    for name, was_reached, parameter in zip(names, reached, parameters, strict=True):
        if not was_reached and parameter.requires_grad:
            problems.append(Problem(f"parameter {name} got no gradient", need, attempt))
        elif not was_reached:
            got = f"parameter {name} got no gradient, for it was frozen after training had been set up"
            problems.append(Problem(got, need, thawed))
    if problems:
        raise TrainingError(problems)


def _view_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """A view of a flat in the parameter's shape, and in its order in memory: fused updates go through both at once."""
    with untracked_access():
        return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


class GradBuckets:
    """The gradients of a step: hooks copy them into slots, buckets are launched when they are complete."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        transport: Transport,
        *,
        allow_unused: bool,
    ) -> None:
        self._parameters, self._buckets, self._transport = parameters, buckets, transport
        self._allow_unused = allow_unused
        self.recorder = NULL_RECORDER
        self._names = [slot.name for bucket in buckets for slot in bucket.slots]
        self._bucket_of = [bucket.index for bucket in buckets for _ in bucket.slots]
        self._paddings = [transport.grad_buffers[bucket.index][bucket.slots[-1].stop :] for bucket in buckets]
        self._first_param = list(itertools.accumulate((len(bucket.slots) for bucket in buckets), initial=0))
        self.views = [
            _view_like(parameters[slot.name], transport.grad_buffers[bucket.index][slot.start : slot.stop])
            for bucket in buckets
            for slot in bucket.slots
        ]
        # Asked in the same way as in `leave_kept`: what asks counts too.
        self._num_view_refs = [sys.getrefcount(self.views[number]) for number in range(len(self.views))]
        self.launch_order = list(range(len(buckets)))
        self.on_launch: Callable[[], None] = noop
        """Called after every launch."""
        self.is_enabled = False
        """Whether gradients are taken: not those of a backward that is no part of a step."""
        # Whether hooks wait for reductions that hold them up. Where weights are gathered in backward they must not: who
        # is to end the reduction may be waiting for a gather that this rank has not begun.
        self._blocks_in_backward = not transport.unshards_params
        self.completion_order: list[int] = []
        """The order in which this rank's buckets became complete in the first round of the present step."""
        for number, name in enumerate(self._names):
            register_last_hook(parameters[name], weak_grad_hook(self, number))
        self.begin_step()

    @property
    def launch_order(self) -> Sequence[int]:
        """The order of the reductions."""
        return self._launch_order

    @launch_order.setter
    def launch_order(self, order: Sequence[int]) -> None:
        self._launch_order = list(order)
        # Where buckets take turns in a slot: who has it before, in the order of launches.
        holder: dict[int, int] = {}
        self._prev_in_buffer: list[int | None] = [None] * len(order)
        for bucket in order:
            turn = self._transport.buffer_indices[bucket]
            self._prev_in_buffer[bucket] = holder.get(turn)
            holder[turn] = bucket
        self._launch_index = {bucket: place for place, bucket in enumerate(order)}

    def begin_step(self) -> None:
        """Begin a step: no slot is written, nothing is launched."""
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
        """Before slots are written: a view that was in `.grad` and that somebody has kept becomes a copy.

        As with torch's own gradients, which are new tensors where `.grad` was None.
        """
        for number in range(len(self.views)):
            if sys.getrefcount(self.views[number]) == self._num_view_refs[number]:
                continue
            view = self.views[number]
            if self._parameters[self._names[number]].grad is not view:
                self.views[number] = view.view(view.shape)
                view.data = view.clone()

    def on_grad(self, parameter: Tensor, param_index: int) -> None:
        """Autograd has a parameter's gradient ready."""
        if not self.is_enabled:
            return
        gradient = parameter.grad
        if gradient is None:
            raise_grad_cleared(self._names[param_index])
        if gradient.requires_grad:
            raise_grad_has_graph(self._names[param_index])
        if gradient is self.views[param_index]:  # autograd has added to the slot itself
            self._written[param_index] = True
        else:
            self._store(param_index)
        self.reached[param_index] = True
        if self._is_last_backward:
            self._count_down(param_index)

    def _store(self, param_index: int) -> None:
        """Take a parameter's gradient into its slot, or hold it where the slot is not free yet."""
        bucket = self._bucket_of[param_index]
        if not self._is_acquired[bucket]:
            if not self._can_acquire(bucket):
                self._waiting_params[bucket].append(param_index)
                return
            self._acquire(bucket)
        self._copy_to_slot(param_index)

    def _can_acquire(self, bucket: int) -> bool:
        before = self._prev_in_buffer[bucket]
        if before is not None and self._launch_index[before] >= self.num_launched:
            return False
        return self._blocks_in_backward or self._transport.can_acquire_buffer(bucket)

    def _acquire(self, bucket: int) -> None:
        if not self._is_acquired[bucket]:
            self._transport.acquire_buffer(bucket)
            self._is_acquired[bucket] = True
            # Where buckets take turns, another one's gradient may lie there, and a norm would count it.
            self._paddings[bucket].zero_()
            for number in self._waiting_params[bucket]:
                self._copy_to_slot(number)
            self._waiting_params[bucket].clear()

    def _copy_to_slot(self, param_index: int) -> None:
        """Copy a gradient into its slot, or add it to what earlier microbatches left there."""
        parameter, view = self._parameters[self._names[param_index]], self.views[param_index]
        gradient = parameter.grad
        assert gradient is not None
        check_dense(gradient, self._names[param_index])
        if self._written[param_index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._written[param_index] = True
        # What autograd allocated is free before the next gradient is made.
        parameter.grad = None

    def _count_down(self, param_index: int) -> None:
        if self._counted[param_index]:
            # Its bucket may be on its way already: this gradient would be lost, or added after the sum.
            raise_second_grad(self._names[param_index])
        self._counted[param_index] = True
        bucket = self._bucket_of[param_index]
        self._num_missing[bucket] -= 1
        if self._num_missing[bucket] == 0:
            if self._round == 0:
                self.completion_order.append(bucket)
            self.recorder.instant(self._reduction_index(bucket), READY_EVENT)
            self._launch_ready(wait=self._blocks_in_backward)

    def _launch_ready(self, *, wait: bool) -> None:
        # In program order, not in ready order: ranks differ in readiness, and collectives must not.
        while (
            self.num_launched < len(self._launch_order)
            and self._num_missing[self._launch_order[self.num_launched]] == 0
        ):
            bucket = self._launch_order[self.num_launched]
            if not (wait or self._transport.can_acquire_buffer(bucket)):
                return
            self._acquire(bucket)
            self._zero_unwritten(bucket)
            self.recorder.instant(self._reduction_index(bucket), LAUNCHED_EVENT)
            self._transport.reduce_async(bucket, self._reduction_index(bucket))
            self.num_launched += 1
            self.on_launch()

    def _reduction_index(self, bucket: int) -> int:
        """The index of a bucket's reduction in the program."""
        return self._round * len(self._buckets) + bucket

    def _zero_unwritten(self, bucket: int) -> None:
        first = self._first_param[bucket]
        for number in range(first, first + len(self._buckets[bucket].slots)):
            if not self._written[number]:
                self.views[number].zero_()

    def drop_grads(self) -> None:
        """Drop what is in `.grad`: a backward that was no part of a step has left it there."""
        for name in self._names:
            self._parameters[name].grad = None

    def store_leftover_grads(self) -> None:
        """Take what earlier backwards left in `.grad` of parameters that the last one did not reach."""
        for number, view in enumerate(self.views):
            gradient = self._parameters[self._names[number]].grad
            if gradient is None or self._counted[number]:
                continue
            if gradient is view:
                self._written[number] = True
            else:
                self._store(number)
            self.reached[number] = True

    def finish_round(self) -> None:
        """End a round: every slot is written or zero, every bucket launched. Does not wait for the sums."""
        if self._round == 0:
            self.completion_order += [bucket.index for bucket in self._buckets if self._num_missing[bucket.index]]
        self._num_missing = [0] * len(self._buckets)
        self._launch_ready(wait=True)

    def first_reached(self, bucket: int) -> str | None:
        """The name of a parameter of the bucket that a backward of the step has reached, if there is one."""
        first = self._first_param[bucket]
        numbers = range(first, first + len(self._buckets[bucket].slots))
        return next((self._names[number] for number in numbers if self.reached[number]), None)

    def check_all_reached(self) -> None:
        """Raise TrainingError naming the parameters that no backward of the step has reached."""
        if not self._allow_unused:
            check_all_reached(self._names, self.reached, map(self._parameters.__getitem__, self._names))

    def local_grads(self, bucket: int) -> list[Tensor]:
        """What this rank measures of a completed bucket's sum."""
        self._transport.reduce_shard(bucket)
        return [self._transport.grad_shard(bucket).flat]

    def detach_grads(self) -> None:
        """The sums are used after the step. They lie where nobody else writes."""

    def restore_grads(self, bucket: int) -> None:
        """A bucket's sum is about to be used. It lies where the update looks for it."""

    def free_grads(self, bucket: int) -> None:
        """A bucket's sum has been used. Its slot is the transport's, which knows when it may be written again."""


# Of elements: 1 MiB of float32, so that a piece stays in the cache while it is summed, scaled and updated.
MAX_SLICE_ELEMENTS = 2**18


class HasShards(Protocol):
    """Weights by bucket: those that the model computes with, and the update's own."""

    shards: Sequence[BucketSlice]
    master_weights: MasterWeights


def update_slices(
    weights: HasShards, buckets: Sequence[Bucket], transport: Transport, *, split_by_param: bool, is_chunked: bool
) -> list[list[UpdateSlice]]:
    """What the update works on, by bucket: weights beside the sums of their gradients.

    A piece per part of the sum; `by_slot` cuts them at the slots too, so that one parameter can be left out, and
    `cut` into pieces of at most PIECE_ELEMENTS: so are pieces whose gradients must be converted.
    """
    result: list[list[UpdateSlice]] = []
    for bucket, weight, own in zip(buckets, weights.shards, weights.master_weights.by_bucket, strict=True):
        slots = [(slot.start, slot.stop) for slot in bucket.slots] if split_by_param else [(0, bucket.size)]
        result.append([])
        for number, (first, last) in enumerate(slots):
            for part in transport.reduced_views(bucket.index):
                low, high = max(first, part.start), min(last, part.stop)
                small = is_chunked or own is not None or part.flat.dtype != weight.flat.dtype
                for start in range(low, high, MAX_SLICE_ELEMENTS if small else max(1, high - low)):
                    stop = min(start + MAX_SLICE_ELEMENTS, high) if small else high
                    gradient = part.flat[start - part.start : stop - part.start]
                    working = weight.flat[start - weight.start : stop - weight.start]
                    mine = (working, None) if own is None else (own.view_range(start, stop), working)
                    result[-1].append(
                        UpdateSlice(start, stop, mine[0], gradient, number if split_by_param else None, mine[1])
                    )
    return result
