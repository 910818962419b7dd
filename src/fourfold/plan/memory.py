"""Memory, thought: the bytes a host's ranks hold of weights, gradients and optimizer states.

element  of a bucket: so many bytes as a weight, as a gradient, in the states; times the bucket's elements
held     long-lived: there from the first step to the last. Activations are not, nor is what an update uses in passing
staging  received shares and copies of shares, while a bucket is on its way over a network
Law: what `parts/memory.py` counts on a host is this, but for alignment, flags and scalars.

Not counted: frozen weights and buffers of the model, and what a codec remembers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.data.buckets import Bucket
from fourfold.plan.data.zero import (
    NUM_GRAD_BUFFERS,
    RESTING_LAYOUTS,
    RestingLayouts,
    ShardGroups,
    grad_buffer_indices,
    layout_changes,
)
from fourfold.plan.plan import Plan
from fourfold.plan.precision import MASTER_BYTES, gradient_bucket, has_master_weights
from fourfold.plan.unshard_order import MAX_UNSHARDED, NUM_STAGING_BUFFERS
from fourfold.words.layout import SPLIT, Change

# Of reductions to split layouts: each holds a received copy of its bucket until it has ended.
MAX_REDUCTIONS_IN_FLIGHT = 4


class HostRanks(NamedTuple):
    """Some of the data ranks, which may share memory. All hosts have as many."""

    num_ranks: int
    shard_groups: ShardGroups
    has_shared_memory: bool

    @property
    def num_shards(self) -> int:
        """In how many shares lies what rests split: where memory is shared, all of a host have one each."""
        return (
            max(self.num_ranks, self.shard_groups.shard_size)
            if self.has_shared_memory
            else self.shard_groups.shard_size
        )

    @property
    def unshards_params(self) -> bool:
        """Whether weights that rest split are not all on this host, or not where its ranks can read them."""
        return self.num_shards > (self.num_ranks if self.has_shared_memory else 1)


class HostMemoryUse(NamedTuple):
    """Bytes on a host, of all its ranks together."""

    weights: float
    gathered: float
    """Room for weights that rest split, while they are used."""
    masters: float
    """The update's own copy of the weights."""
    gradients: float
    states: float
    staging: float

    @property
    def total(self) -> float:
        return sum(self)


class BucketBytes(NamedTuple):
    """Bytes that each of a bucket's `num` elements takes; `masters` and what is `kept` (local steps) may be 0."""

    num_elements: int
    weight: int
    gradient: int
    master: int
    state: int
    local_sgd_state: int = 0


def has_unbucketed_grads(plan: Plan) -> bool:
    """Whether gradients stay where autograd leaves them: nobody sums, encodes, converts or keeps them."""
    numbers = plan.precision == plan.reduce_dtype == "keep"
    return plan.mesh.size == 1 and numbers and (plan.sync, plan.codec, plan.offload) == ("step", "none", "none")


def bytes_per_element(
    buckets: Sequence[Bucket], plan: Plan, *, num_states: Sequence[int], original_bytes: Mapping[str, int]
) -> list[BucketBytes]:
    """What each bucket's elements take.

    `num_states`: by group, the tensors an update keeps. `own_bytes`: by parameter, of an element as the user made it.
    """
    result = []
    for bucket in buckets:
        master = 0
        if has_master_weights(bucket, plan.precision):
            master = max(MASTER_BYTES, *(original_bytes[slot.name] for slot in bucket.slots))
        state = num_states[bucket.param_group] * (master or bucket.element_bytes)
        gradient = 0 if has_unbucketed_grads(plan) else gradient_bucket(bucket, plan.reduce_dtype).element_bytes
        kept = (1 + bool(plan.outer_momentum)) * bucket.element_bytes if plan.sync == "local" else 0
        result.append(BucketBytes(bucket.size, bucket.element_bytes, gradient, master, state, kept))
    return result


def host_memory_use(buckets: Sequence[BucketBytes], *, zero: int, host: HostRanks) -> HostMemoryUse:
    """What the ranks of a host hold, at most: updated in backward, less may be on its way at a time."""
    rest = RESTING_LAYOUTS[zero if host.shard_groups.shard_size > 1 else 0]
    split, gathers = rest.state == SPLIT, rest.weight == SPLIT and host.unshards_params
    # Of a host's ranks together, in wholes.
    states = host.num_ranks / host.num_shards if split else host.num_ranks
    shards = host.num_ranks / host.num_shards if rest.gradient == SPLIT else 0
    weights = states if gathers else 1 if split and host.has_shared_memory else host.num_ranks
    slots = _grad_buffer_bytes([b.num_elements * b.gradient for b in buckets], is_cyclic=rest.gradient == SPLIT)
    return HostMemoryUse(
        weights=sum(b.num_elements * (b.weight * weights + b.local_sgd_state * host.num_ranks) for b in buckets),
        gathered=_unsharded_bytes(buckets, host) if gathers else 0,
        masters=sum(b.num_elements * b.master for b in buckets) * states,
        gradients=slots * host.num_ranks + sum(b.num_elements * b.gradient for b in buckets) * shards,
        states=sum(b.num_elements * b.state for b in buckets) * states,
        staging=_staging_bytes(buckets, rest, host) if split and host.unshards_params else 0,
    )


def _grad_buffer_bytes(lengths: Sequence[int], *, is_cyclic: bool) -> int:
    """Bytes of one rank's gradient slots: those that take turns lie in the room of the largest of them."""
    room: dict[int, int] = {}
    for turn, length in zip(grad_buffer_indices(len(lengths), is_cyclic=is_cyclic), lengths, strict=True):
        room[turn] = max(room.get(turn, 0), length)
    return sum(room.values())


def _unsharded_bytes(buckets: Sequence[BucketBytes], host: HostRanks) -> int:
    """Bytes of a host's room for whole buckets: each rank holds some beside one that comes; stages are there once."""
    largest = max(b.num_elements * b.weight for b in buckets)
    return largest * (
        min(len(buckets), MAX_UNSHARDED + 1) * host.num_ranks + NUM_STAGING_BUFFERS * host.has_shared_memory
    )


def _staging_bytes(buckets: Sequence[BucketBytes], rest: RestingLayouts, host: HostRanks) -> float:
    """Bytes of what is on its way at a host's ranks: addends of what a rank sums, and copies of its shares of weights.

    Where memory is shared each rank sends its slice. Then only addends that take turns in a slot wait for each other.
    """
    parts, several = (host.num_ranks, len(buckets)) if host.has_shared_memory else (1, MAX_REDUCTIONS_IN_FLIGHT)
    turned = min(several, NUM_GRAD_BUFFERS) if rest.gradient == SPLIT else several
    addends = [b.num_elements * b.gradient / parts for b in buckets]
    shares = [b.num_elements * b.weight / host.num_shards for b in buckets]
    copies = 0 if layout_changes(rest).after_update == Change.NONE else _in_flight_bytes(shares, several)
    return (_in_flight_bytes(addends, turned) + copies) * host.num_ranks


def _in_flight_bytes(lengths: Sequence[float], num_in_flight: int) -> float:
    """Bytes of so many in a row at a time; room that has been used is used again for what is as long."""
    windows = [lengths[first : first + num_in_flight] for first in range(len(lengths))]
    return sum(length * max(window.count(length) for window in windows) for length in set(lengths))
