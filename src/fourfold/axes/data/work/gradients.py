"""Gradients: what the step asks of the gradients of a stage, wherever they lie.

Law: `GradBuckets` and `UnbucketedGrads` differ in where gradients lie, never in what a step computes.

Countdown: which buckets have all their gradients, and which one is launched next.

countdown  number of a bucket's parameters without a gradient in the round's last backward; at 0 the bucket is complete
round      the backwards between two sets of reductions of a bucket: those of a whole step, or one if gradients rest
           split, of its stage; a round that is begun for some buckets launches these only
launch     the start of a bucket's reduction, in program order (the same on every rank), while backward continues
Law: buckets are launched in program order, whatever the order in which they become complete.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.words.errors import Problem, TrainingError

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

    def complete_all(self) -> None:
        """The round has no more gradients: all buckets are complete."""
        self.complete(range(len(self._sizes)))

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


def check_untouched(countdown: Countdown, parameters: Iterable[nn.Parameter]) -> None:
    """Raise TrainingError naming a parameter that has a gradient before the first backward of the step."""
    if any(countdown.reached):
        return
    rows = zip(countdown.names, parameters, strict=True)
    if name := next((name for name, parameter in rows if parameter.grad is not None), None):
        got = f"a backward() within forward, which gives {name} a gradient, where the batch is split"
        need = "one backward for each part of the batch: that of the loss, by which Fourfold divides"
        raise TrainingError(
            Problem(got, need, "the loss of the layer returned by forward, and added by the loss function")
        )


def check_all_reached(countdown: Countdown, buckets: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
    """Raise TrainingError naming the parameters of these buckets that no backward of the step has reached.

    `parameters` are in the order of the countdown.
    """
    need = "a gradient for every trainable parameter"
    # A reentrant checkpoint without an input that requires a gradient gives its parameters none.
    attempt = 'unused = "allow", or requires_grad_(False), or use_reentrant=False if it is in a checkpoint'
    attempt_frozen = 'unused = "allow", which lets parameters be frozen and unfrozen during training'
    problems = []
    rows = zip(countdown.names, countdown.bucket_of, countdown.reached, parameters, strict=True)
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


# ---- gradients -------------------------------------------------------------------------------------------------------


class Gradients(Protocol):
    """The gradients of a stage's parameters, by bucket."""

    countdown: Countdown
    """Which buckets are complete and launched."""

    def begin_step(self) -> None:
        """Begin a step: there are no gradients."""
        ...

    def begin_round(self, buckets: Sequence[int], number: int) -> None:
        """Begin a round of reductions: see `Countdown`."""
        ...

    def set_launch_order(self, order: Sequence[int]) -> None:
        """Fix the order of the reductions."""
        ...

    def store(self, param_index: int) -> bool:
        """Take a gradient that autograd has accumulated. Returns whether a bucket is complete now."""
        ...

    def launch_next(self, factor: float | None, *, may_wait: bool) -> int | None:
        """Launch the next bucket in program order if it is complete. Returns it, or None.

        factor    what the sums are multiplied by; None while it is not known
        may_wait  whether to wait for the bucket's buffer, in backward only where that is harmless
        """
        ...

    def record_done(self, bucket: int) -> None:
        """Record that a bucket's sum is there."""
        ...

    def check_untouched(self) -> None:
        """Raise TrainingError naming a parameter that has a gradient before the first backward of the step."""
        ...

    def check_all_reached(self, buckets: Sequence[int]) -> None:
        """Raise TrainingError naming the parameters of these buckets that no backward of the step has reached.

        What a backward within forward has given them is their gradient.
        """
        ...

    def local_grads(self, bucket: int) -> list[Tensor]:
        """This rank's part of a bucket's sum, for the norm; the reduction has ended."""
        ...

    def drop_grads(self) -> None:
        """Drop what is in `.grad`: backwards outside of steps have left it there."""
        ...

    def detach_grads(self) -> None:
        """The update comes after the step: keep gradients where the user does not reach them."""
        ...

    def restore_grads(self, bucket: int) -> None:
        """Put a bucket's detached gradients where the update reads them."""
        ...

    def free_grads(self, bucket: int) -> None:
        """Free a bucket's gradients after their update."""
        ...


class MeanSink:
    """Takes the gradients of backwards whose sums are divided later, and launches the buckets that they complete."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def on_grad(self, param_index: int) -> None:
        if self._gradients.store(param_index):
            while self._gradients.launch_next(1.0, may_wait=False) is not None:
                pass


def launch_all(gradients: Gradients, factor: float | None) -> None:
    """End a round: launch all remaining buckets. Does not wait for the sums."""
    gradients.countdown.complete_all()
    launch_complete(gradients, factor)


def launch_complete(gradients: Gradients, factor: float | None) -> None:
    """Launch the buckets that are complete, up to the first that is not. Does not wait for the sums."""
    while gradients.launch_next(factor, may_wait=True) is not None:
        pass
