"""Countdown: which buckets have all their gradients, and which one is launched next.

countdown  number of a bucket's parameters without a gradient in the round's last backward; at 0 the bucket is complete
round      the backwards between two sets of reductions: those of a whole step, or one if gradients rest split
launch     the start of a bucket's reduction, in program order (the same on every rank), while backward continues
Law: buckets are launched in program order, whatever the order in which they become complete.
"""

from collections.abc import Sequence

from fourfold.plan.data.buckets import Bucket


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
        self._round = -1
        self.begin_round()

    def begin_round(self) -> None:
        """Begin a round of reductions."""
        self._round += 1
        self.counted = [False] * len(self.names)
        self._num_missing = list(self._sizes)
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
        if self._round == 0:
            self.completion_order.append(bucket)
        return True

    def complete_all(self) -> None:
        """The round has no more gradients: all buckets are complete."""
        if self._round == 0:
            self.completion_order += [bucket for bucket, missing in enumerate(self._num_missing) if missing]
        self._num_missing = [0] * len(self._sizes)

    def next_complete(self) -> int | None:
        """The bucket to launch next, if it is complete."""
        if self.num_launched == len(self.launch_order):
            return None
        bucket = self.launch_order[self.num_launched]
        return None if self._num_missing[bucket] else bucket

    def is_launched(self, bucket: int) -> bool:
        """Whether a bucket has been launched in this round."""
        return bucket in self.launch_order[: self.num_launched]

    def reduction_index(self, bucket: int) -> int:
        """The index of the bucket's reduction in the program, in this round."""
        return self._round * len(self._sizes) + bucket

    def first_reached(self, bucket: int) -> str | None:
        """The name of the bucket's first parameter that a backward of this step has reached; None if there is none."""
        first = sum(self._sizes[:bucket])
        indices = range(first, first + self._sizes[bucket])
        return next((self.names[index] for index in indices if self.reached[index]), None)
