"""ZeRO: how a bucket's weights, gradients and optimizer states rest at each level, and what that sends.

rests   the layout a tensor has between its uses: whole, split or partial
Law: the collectives of a step are the differences between these layouts (`words/layout.py`), and nothing else.

Source: Rajbhandari et al., "ZeRO" (2020), §5.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.words.layout import PARTIAL, SPLIT, WHOLE, Change, Layout, change, collective_sent_bytes


class RestingLayouts(NamedTuple):
    """The layouts in which the three tensors of a bucket rest."""

    weight: Layout
    gradient: Layout
    state: Layout


RESTING_LAYOUTS = {
    0: RestingLayouts(WHOLE, PARTIAL, WHOLE),
    1: RestingLayouts(WHOLE, PARTIAL, SPLIT),
    2: RestingLayouts(WHOLE, SPLIT, SPLIT),
    3: RestingLayouts(SPLIT, SPLIT, SPLIT),
}


NUM_GRAD_BUFFERS = 4  # that buckets share where gradients rest split


def grad_buffer_indices(num_buckets: int, *, is_cyclic: bool) -> tuple[int, ...]:
    """The gradient buffer that each bucket uses: one of its own, or, if cyclic, one of a few in turn."""
    if is_cyclic:
        return tuple(index % NUM_GRAD_BUFFERS for index in range(num_buckets))
    return tuple(range(num_buckets))


class LayoutChanges(NamedTuple):
    """How the layout of a bucket's tensors changes at four points of a step."""

    before_use: Change
    after_backward: Change
    before_update: Change
    after_update: Change


def layout_changes(rest: RestingLayouts) -> LayoutChanges:
    """The collectives of a step, as differences between the resting layouts and those that a use needs."""
    return LayoutChanges(
        before_use=change(rest.weight, WHOLE),
        after_backward=change(PARTIAL, rest.gradient),
        before_update=change(rest.gradient, rest.state),
        after_update=change(rest.state, rest.weight),
    )


class ShardGroups(NamedTuple):
    """The data ranks as num_replicas × shard_size: `shard_size` ranks split a bucket, and `num_replicas` groups of such
    ranks hold the same shards.

    Consecutive ranks form a group: rank r has shard r % shard_size of replica r // shard_size.
    """

    shard_size: int
    num_replicas: int = 1

    @property
    def size(self) -> int:
        return self.shard_size * self.num_replicas

    def reduce_sent_bytes(self, collective: Change, whole_bytes: int) -> float:
        """Bytes that a rank sends to sum a bucket. After a reduce-scatter, shards are also summed over the replicas."""
        if collective != Change.REDUCE_SCATTER:
            return collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.size)
        scattered = collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.shard_size)
        replicated = collective_sent_bytes(Change.ALL_REDUCE, whole_bytes=whole_bytes, size=self.num_replicas)
        return scattered + replicated / self.shard_size

    def all_gather_sent_bytes(self, collective: Change, whole_bytes: int) -> float:
        """Bytes that a rank sends to all-gather a bucket within its replica."""
        return collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.shard_size)


def step_sent_bytes(
    buckets: Iterable[Bucket],
    *,
    zero: int,
    shard_groups: ShardGroups,
    microbatches: int,
    gradient_buckets: Iterable[Bucket] | None = None,
) -> float:
    """Bytes that each data rank sends in a step. Zero 3 gathers the weights for forward and again for backward.

    `gradient_buckets`: the buckets with the dtype in which gradients are summed, if that is another one.
    """
    changes = layout_changes(RESTING_LAYOUTS[zero])
    weight_bytes = sum(bucket.num_bytes for bucket in buckets)
    grad_bytes = weight_bytes if gradient_buckets is None else sum(bucket.num_bytes for bucket in gradient_buckets)
    per_microbatch = 2 * shard_groups.all_gather_sent_bytes(changes.before_use, weight_bytes)
    per_microbatch += shard_groups.reduce_sent_bytes(changes.after_backward, grad_bytes)
    once = shard_groups.reduce_sent_bytes(changes.before_update, grad_bytes)
    once += shard_groups.all_gather_sent_bytes(changes.after_update, weight_bytes)
    return microbatches * per_microbatch + once


# ---- transport request ---------------------------------------------------------------------------------------------

MIN_SCALARS = 8  # the loss and the counts of a step


class TransportRequest(NamedTuple):
    """What the ranks that sum gradients need of the transport that joins them, which learns nothing else of the plan.

    There is one entry per bucket in `sizes` (elements), `dtypes`, `buffer_indices` and `weight_dtypes`.

    dtypes           of the gradient buffers
    buffer_indices   buckets with the same index share one gradient buffer, one after the other
    resting_layouts  as the plan has them, if anything can be split at all; a transport that keeps the weights once per
                     host need not gather them
    num_scalars      room for the scalars of one all-reduce
    num_shards       how many neighbouring ranks the split tensors are split among; None: nothing rests split
    """

    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    buffer_indices: tuple[int, ...]
    resting_layouts: RestingLayouts
    num_scalars: int
    num_shards: int | None
    weight_dtypes: tuple[str, ...]


def request_transport(
    buckets: Sequence[Bucket],
    gradient_buckets: Sequence[Bucket],
    resting_layouts: RestingLayouts,
    *,
    num_shards: int,
    num_scalars: int,
) -> TransportRequest:
    """The request of these buckets; `gradient_buckets` have the dtypes in which gradients are summed."""
    return TransportRequest(
        sizes=tuple(bucket.size for bucket in buckets),
        dtypes=tuple(bucket.dtype for bucket in gradient_buckets),
        buffer_indices=grad_buffer_indices(len(buckets), is_cyclic=resting_layouts.gradient == SPLIT),
        resting_layouts=resting_layouts,
        num_scalars=max(MIN_SCALARS, num_scalars),
        num_shards=num_shards if resting_layouts.state == SPLIT else None,
        weight_dtypes=tuple(bucket.dtype for bucket in buckets),
    )
