"""Gradients: what the step asks of the gradients of a stage, wherever they lie.

Law: `GradBuckets` and `UnbucketedGrads` differ in where gradients lie, never in what a step computes.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fourfold.axes.data.work.countdown import Countdown


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
