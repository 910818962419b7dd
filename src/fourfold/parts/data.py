"""The data axis, done: gradients go from autograd into slots, from slots into sums.

slot       a parameter's stretch of its bucket's gradient flat
countdown  parameters of a bucket that have no gradient yet in the last microbatch; zero permits the reduction
launch     reductions begin in program order, on every rank the same, while backward goes on
Law: a step is sealed with every slot written or known to be unused, and every bucket launched.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.parts import memory
from fourfold.parts.comm import Transport
from fourfold.parts.optim import Piece
from fourfold.plan.data import Bucket, Spec
from fourfold.words.errors import Problem, TaskError, TrainingError
from fourfold.words.spans import READY, SENT, SILENT


def specs(parameters: Mapping[str, nn.Parameter], groups: Mapping[str, int]) -> list[Spec]:
    """What bucket arithmetic must know of the trainable parameters, in order of definition."""
    return [
        Spec(name, p.numel(), str(p.dtype).removeprefix("torch."), p.element_size(), groups.get(name, 0))
        for name, p in parameters.items()
    ]


def dtype_of(bucket: Bucket) -> torch.dtype:
    return getattr(torch, bucket.dtype)


@torch.no_grad()
def rehome(parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket]) -> list[Tensor]:
    """Move the weights into one flat per bucket; each parameter becomes a view of its slot. Returns the flats."""
    flats = []
    for bucket in buckets:
        first = parameters[bucket.slots[0].name]
        flat = memory.private(bucket.size, dtype_of(bucket), first.device)
        for slot in bucket.slots:
            parameter = parameters[slot.name]
            place = flat[slot.start : slot.stop].view(parameter.shape)
            place.copy_(parameter)
            parameter.data = place
        flats.append(flat)
    return flats


class Gradients:
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
        self.recorder = SILENT
        self._names = [slot.name for bucket in buckets for slot in bucket.slots]
        self._bucket_of = [bucket.index for bucket in buckets for _ in bucket.slots]
        self.views = [
            transport.slots[bucket.index][slot.start : slot.stop].view(parameters[slot.name].shape)
            for bucket in buckets
            for slot in bucket.slots
        ]
        self.launch_order = list(range(len(buckets)))
        self.listening = False
        """Whether gradients are taken: not those of a backward that is no part of a step."""
        self.completion_order: list[int] = []
        """The order in which this rank's buckets became complete in the present step."""
        for number, name in enumerate(self._names):
            parameters[name].register_post_accumulate_grad_hook(self._hook(number))
        self.begin()

    def begin(self) -> None:
        """Begin a step: no slot is written, nothing is launched."""
        self.written = [False] * len(self._names)
        self._counted = [False] * len(self._names)
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._next, self._last, self._opened = 0, False, False
        self.completion_order = []

    def last(self) -> None:
        """The next backward is the step's last: buckets may be launched as they become complete."""
        self._last = True

    def _hook(self, number: int):
        view = self.views[number]

        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or not self.listening:
                return
            if gradient is not view:  # else autograd has added to the slot itself
                self._put(gradient, number)
                # What autograd allocated is free before the next gradient is made.
                parameter.grad = None
            self.written[number] = True
            if self._last:
                self._count_down(number)

        return take

    def _put(self, gradient: Tensor, number: int) -> None:
        """Copy a gradient into its slot, or add it to what earlier microbatches left there."""
        if gradient.layout is not torch.strided:
            problem = Problem(f"{self._names[number]} has a sparse gradient", "dense gradients", "sparse=False")
            raise TaskError(problem)
        if self.written[number]:
            self.views[number].add_(gradient)
        else:
            self._open()
            self.views[number].copy_(gradient)

    def _open(self) -> None:
        if not self._opened:
            self._transport.open()
            self._opened = True

    def _count_down(self, number: int) -> None:
        if self._counted[number]:
            # Its bucket may be on its way already: this gradient would be lost, or added after the sum.
            got = f"two gradients of {self._names[number]} in one backward (a reentrant checkpoint around its layer?)"
            raise TaskError(Problem(got, "one, with all uses added up", "checkpoint(…, use_reentrant=False)"))
        self._counted[number] = True
        bucket = self._bucket_of[number]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self.completion_order.append(bucket)
            self.recorder.moment(bucket, READY)
            self._launch_complete()

    def _launch_complete(self) -> None:
        # In program order, not in ready order: ranks differ in readiness, and collectives must not.
        while self._next < len(self.launch_order) and self._missing[self.launch_order[self._next]] == 0:
            self.recorder.moment(self.launch_order[self._next], SENT)
            self._transport.launch(self.launch_order[self._next])
            self._next += 1

    def forget(self) -> None:
        """Drop what is in `.grad`: a backward that was no part of a step has left it there."""
        for name in self._names:
            self._parameters[name].grad = None

    def take_left(self) -> None:
        """Take what earlier backwards left in `.grad` of parameters that the last one did not reach."""
        for number, view in enumerate(self.views):
            gradient = self._parameters[self._names[number]].grad
            if gradient is None or self._counted[number]:
                continue
            if gradient is not view:
                self._put(gradient, number)
            self.written[number] = True

    def seal(self, *, empty: bool = False) -> None:
        """End the last backward: every slot is written or zero, every bucket launched. Does not wait.

        `empty`: this rank had no samples. Raises TrainingError naming the parameters without gradient.
        """
        unwritten = [number for number, written in enumerate(self.written) if not written]
        if unwritten and not empty and not self._allow_unused:
            raise TrainingError(
                [
                    Problem(
                        f"parameter {self._names[number]} got no gradient",
                        "a gradient for every trainable parameter",
                        'unused = "allow", or requires_grad_(False)',
                    )
                    for number in unwritten
                ]
            )
        self._open()
        for number in unwritten:
            self.views[number].zero_()
        self.completion_order += [bucket.index for bucket in self._buckets if self._missing[bucket.index]]
        self._missing = [0] * len(self._buckets)
        self._launch_complete()


def pieces(
    weights: Sequence[Tensor], buckets: Sequence[Bucket], transport: Transport, *, by_slot: bool
) -> list[list[Piece]]:
    """What the update works on, by bucket: weights beside the sums of their gradients.

    A piece per part of the sum; `by_slot` cuts them at the slots too, so that one parameter can be left out.
    """
    result: list[list[Piece]] = []
    for bucket, weight in zip(buckets, weights, strict=True):
        slots = [(slot.start, slot.stop) for slot in bucket.slots] if by_slot else [(0, bucket.size)]
        result.append([])
        for number, (first, last) in enumerate(slots):
            for part in transport.sums(bucket.index):
                start, stop = max(first, part.start), min(last, part.stop)
                if start < stop:
                    gradient = part.flat[start - part.start : stop - part.start]
                    result[-1].append(Piece(start, stop, weight[start:stop], gradient, number if by_slot else None))
    return result
