"""Gradient rounds: after which backwards of a step the buckets are reduced.

round    the reductions after one backward, or after the last one of a step
Law: every microbatch's gradient is in exactly one round, and every rank has the same rounds.
"""

from collections.abc import Sequence
from typing import Protocol

from fourfold.axes.data.work.gradients import Gradients


class GradRounds(Protocol):
    """The rounds of a stage. Microbatches are numbered from 0; the last one may be empty on this rank."""

    def begin_backward(self, gradients: Gradients, buckets: Sequence[int], index: int, last_nonempty: int) -> None:
        """The backward of microbatch `index` begins, which gives gradients of these buckets.

        `last_nonempty` is the last microbatch with samples on this rank.
        """
        ...

    def ends_with(self, index: int, num_microbatches: int) -> bool:
        """Whether a round ends with this microbatch."""
        ...

    def has_all_grads(self, index: int, num_microbatches: int) -> bool:
        """Whether a bucket that is launched in this backward has all gradients of the step: it may be updated."""
        ...


class OneRound:
    """Gradients are added up over the microbatches, and reduced once."""

    def begin_backward(self, gradients: Gradients, buckets: Sequence[int], index: int, last_nonempty: int) -> None:
        gradients.countdown.is_last_backward = index == last_nonempty

    def ends_with(self, index: int, num_microbatches: int) -> bool:
        return index == num_microbatches - 1

    def has_all_grads(self, index: int, num_microbatches: int) -> bool:
        return True


class RoundEveryBackward:
    """Gradients rest split: every backward is followed by reductions, which add to this rank's shard."""

    def begin_backward(self, gradients: Gradients, buckets: Sequence[int], index: int, last_nonempty: int) -> None:
        gradients.begin_round(buckets, index)
        gradients.countdown.is_last_backward = True

    def ends_with(self, index: int, num_microbatches: int) -> bool:
        return True

    def has_all_grads(self, index: int, num_microbatches: int) -> bool:
        return index == num_microbatches - 1
