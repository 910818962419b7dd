"""The data axis, thought: buckets, where they rest, and the program of a step.

slot    one parameter's place in a bucket, [start, stop) in elements
bucket  consecutive slots in reverse order of definition, one dtype, one optimizer group
rest    where a bucket's weights, gradients and optimizer states lie between uses
round   the reductions after one backward; only where gradients rest split is there more than one in a step
Law: slots tile the bucket, padding only at the end, so every share of it is one contiguous slice.

Source of the table of rests: Rajbhandari et al., "ZeRO" (2020), §5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.words.layout import PARTIAL, SPLIT, WHOLE, Change, Layout, change, collective_sent_bytes
from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS, Action, Verb

# A share begins and ends with a cache line, so that no line has two writers.
SHARD_ALIGNMENT = 32


class ParamSpec(NamedTuple):
    """What must be known of a parameter to give it a place."""

    name: str
    num_elements: int
    dtype: str
    element_bytes: int
    param_group: int = 0


class Slot(NamedTuple):
    """One parameter's place in its bucket, in elements."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together: `size` elements, of which those behind the last slot are padding."""

    index: int
    slots: tuple[Slot, ...]
    size: int
    dtype: str
    element_bytes: int
    param_group: int

    @property
    def num_bytes(self) -> int:
        """Without the padding."""
        return self.slots[-1].stop * self.element_bytes


def make_buckets(specs: Sequence[ParamSpec], *, bucket_bytes: int, num_shards: int = 1) -> tuple[Bucket, ...]:
    """Buckets of about `bucket_bytes` for parameters given in order of definition, padded to `shares` equal shares.

    A bucket is closed before it would grow beyond `bucket_bytes`; a larger parameter has one of its own.
    Buckets are numbered by when their last parameter comes, in reverse order of definition, so that the
    first to be complete in backward is the first to be reduced.
    """
    opened: dict[tuple[str, int], list[ParamSpec]] = {}
    closed: list[list[ParamSpec]] = []
    for spec in reversed(specs):
        key = spec.dtype, spec.param_group
        members = opened.setdefault(key, [])
        held = sum(member.num_elements for member in members)
        if members and (held + spec.num_elements) * spec.element_bytes > bucket_bytes:
            closed.append(members)
            members = opened[key] = []
        members.append(spec)
    place = {spec.name: index for index, spec in enumerate(reversed(specs))}
    closed.extend(opened.values())
    closed.sort(key=lambda members: place[members[-1].name])
    return tuple(_bucket(index, members, num_shards) for index, members in enumerate(closed))


# Of the gradients of a model that travel between hosts, so that most of them do while backward goes on.
NUM_INTER_HOST_BUCKETS = 8
# 42 ms at 100 Mbit/s, 4 ms at 1 Gbit/s: a latency is little beside it.
MIN_INTER_HOST_BUCKET_BYTES = 2**19


def effective_bucket_bytes(specs: Sequence[ParamSpec], bucket_bytes: int, *, is_inter_host: bool) -> int:
    """The bytes at which `fill` is to close a bucket, where the plan says `bucket_bytes` at most.

    Inside a host a sum takes less time than a matrix product, and few buckets cost least. What travels between hosts,
    or has a codec because it is to, would of a small model be on its way only when backward is over
    (`docs/measured.md`, "Several hosts behind slow links").
    """
    if not is_inter_host:
        return bucket_bytes
    whole = sum(spec.num_elements * spec.element_bytes for spec in specs)
    return min(bucket_bytes, max(MIN_INTER_HOST_BUCKET_BYTES, whole // NUM_INTER_HOST_BUCKETS))


def _bucket(index: int, members: Sequence[ParamSpec], num_shards: int) -> Bucket:
    slots, start = [], 0
    for spec in members:
        slots.append(Slot(spec.name, start, start + spec.num_elements))
        start += spec.num_elements
    first = members[0]
    unit = num_shards * SHARD_ALIGNMENT if num_shards > 1 else 1
    size = -(-start // unit) * unit
    return Bucket(index, tuple(slots), size, first.dtype, first.element_bytes, first.param_group)


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


class DataStepSpec(NamedTuple):
    """What a data rank's step consists of; `order` is the launch order recorded in the first step.

    `trust`: norms of single parameters are wanted, and parameters are split among ranks.
    """

    microbatches: int
    num_buckets: int
    resting_layouts: RestingLayouts = RESTING_LAYOUTS[0]
    has_clip: bool = False
    allows_unused: bool = False
    update: str = "after"
    launch_order: tuple[int, ...] = ()
    has_trust_ratios: bool = False
    sync: str = "step"
    """"step": gradients are reduced. "apart": they stay with their rank. "meet": they do, and weights are averaged."""


def lower_step(step: DataStepSpec) -> tuple[Action, ...]:
    """A data rank's step: forwards and backwards, reductions in launch order, then the updates.

    Reductions stand behind the backward that completes them, and a runtime may begin each one while that backward
    goes on, as soon as it is permitted and in this order. Where gradients rest split there is a round of reductions
    after every backward; the reduction of bucket b in round r has the index r × num_buckets + b.

    Where ranks keep their gradients there are no reductions; where they meet, the difference a bucket has made is
    pushed behind its update, and the averages are pulled at the end.

    `update = "in_backward"` puts each update behind the bucket's last reduction, and it too may begin while backward
    goes on (Jiang et al., "Optimizer Fusion", 2021: backward fusion). `update = "in_forward"` puts the updates by the
    gradient of the step before in front of the first forward, what is used first at the head; each may be put off until
    that forward comes to its bucket (the same: forward fusion).
    """
    launch = step.launch_order or tuple(range(step.num_buckets))
    moments = layout_changes(step.resting_layouts)
    gathers = moments.after_update != Change.NONE
    update = [
        [Action(Verb.UPDATE, 0, bucket), *([Action(Verb.GATHER, 0, bucket)] if gathers else [])]
        for bucket in range(step.num_buckets)
    ]
    push = [[Action(Verb.PUSH, 0, b)] if step.sync == "meet" else [] for b in range(step.num_buckets)]
    actions: list[Action] = []
    if step.update == "in_forward":
        actions += [action for bucket in reversed(launch) for action in update[bucket]]
    for index in range(step.microbatches):
        last = index == step.microbatches - 1
        actions.append(Action(Verb.FORWARD, 0, index))
        if last:
            actions.append(Action(Verb.MEASURE, 0, LOSS))
        actions.append(Action(Verb.BACKWARD, 0, index))
        if last or moments.after_backward != Change.NONE:
            first = index * step.num_buckets if moments.after_backward != Change.NONE else 0
            for bucket in launch:
                if step.sync == "step":
                    actions.append(Action(Verb.REDUCE, 0, first + bucket))
                if last and step.update == "in_backward":
                    actions += update[bucket]
    if step.allows_unused:
        actions.append(Action(Verb.MEASURE, 0, USED_PARAMS))
    if step.has_clip:
        actions.append(Action(Verb.MEASURE, 0, GRAD_NORM))
    if step.has_trust_ratios:
        actions.append(Action(Verb.MEASURE, 0, TRUST_NORMS))
    if step.update == "after":
        actions += [action for bucket in launch for action in update[bucket] + push[bucket]]
    else:
        actions += [action for bucket in launch for action in push[bucket]]
    if step.sync == "meet":
        actions += [Action(Verb.PULL, 0, bucket) for bucket in launch]
    return tuple(actions)
