"""ZeRO: how a bucket's weights, gradients and optimizer states rest at each level, and what that sends.

rests   the layout a tensor has between its uses: whole, split or partial
Law: the collectives of a step are the differences between these layouts (`words/layout.py`), and nothing else.

Source: Rajbhandari et al., "ZeRO" (2020), §5.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fourfold.plan.data.buckets import Bucket
from fourfold.words.layout import PARTIAL, SPLIT, WHOLE, Change, Layout, change, collective_sent_bytes


class RestingLayouts(NamedTuple):
    """Where a bucket's three tensors lie between uses."""

    weight: Layout
    gradient: Layout
    state: Layout


RESTING_LAYOUTS = {
    0: RestingLayouts(WHOLE, PARTIAL, WHOLE),
    1: RestingLayouts(WHOLE, PARTIAL, SPLIT),
    2: RestingLayouts(WHOLE, SPLIT, SPLIT),
    3: RestingLayouts(SPLIT, SPLIT, SPLIT),
}


NUM_GRAD_BUFFERS = 4


def grad_buffer_indices(num_buckets: int, *, is_cyclic: bool) -> tuple[int, ...]:
    """By bucket: which of this rank's gradient slots it uses: one of its own, or one of a few, by turns."""
    if is_cyclic:
        return tuple(index % NUM_GRAD_BUFFERS for index in range(num_buckets))
    return tuple(range(num_buckets))


class LayoutChanges(NamedTuple):
    """A bucket's life: what each moment of a step changes."""

    before_use: Change
    after_backward: Change
    before_update: Change
    after_update: Change


def layout_changes(rest: RestingLayouts) -> LayoutChanges:
    """The collectives of a step: nothing but differences between layouts."""
    return LayoutChanges(
        before_use=change(rest.weight, WHOLE),
        after_backward=change(PARTIAL, rest.gradient),
        before_update=change(rest.gradient, rest.state),
        after_update=change(rest.state, rest.weight),
    )


class ShardGroups(NamedTuple):
    """The data ranks as replicas × shard: a flat is split over `shard` of them, and `replicas` hold each share.

    Neighbours share: rank r has share r % shard of replica r // shard.
    """

    shard_size: int
    num_replicas: int = 1

    @property
    def size(self) -> int:
        return self.shard_size * self.num_replicas

    def reduce_sent_bytes(self, collective: Change, whole_bytes: int) -> float:
        """Bytes a rank sends to sum a flat. One that comes to rest split is then summed over the replicas."""
        if collective != Change.REDUCE_SCATTER:
            return collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.size)
        inside = collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.shard_size)
        return (
            inside
            + collective_sent_bytes(Change.ALL_REDUCE, whole_bytes=whole_bytes, size=self.num_replicas)
            / self.shard_size
        )

    def all_gather_sent_bytes(self, collective: Change, whole_bytes: int) -> float:
        """Bytes a rank sends to bring the shares of a flat together: each replica has all of them."""
        return collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.shard_size)


def step_sent_bytes(
    buckets: Iterable[Bucket],
    *,
    zero: int,
    shard_groups: ShardGroups,
    microbatches: int,
    gradient_buckets: Iterable[Bucket] | None = None,
) -> float:
    """Bytes each data rank sends in a step; zero 3 gathers for forward and again for backward.

    `gradients`: the buckets in the numbers in which gradients are summed, where these are others.
    """
    moments = layout_changes(RESTING_LAYOUTS[zero])
    weights = sum(bucket.num_bytes for bucket in buckets)
    summed = weights if gradient_buckets is None else sum(bucket.num_bytes for bucket in gradient_buckets)
    each = 2 * shard_groups.all_gather_sent_bytes(moments.before_use, weights)
    each += shard_groups.reduce_sent_bytes(moments.after_backward, summed)
    once = shard_groups.reduce_sent_bytes(moments.before_update, summed) + shard_groups.all_gather_sent_bytes(
        moments.after_update, weights
    )
    return microbatches * each + once
