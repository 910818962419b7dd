"""Memory: the bytes of weights, gradients and optimizer states that the ranks of a host hold.

bytes per element  of a bucket: of its weight, its gradient, its optimizer states
held               allocated from the first step to the last; activations and temporaries of an update are not
staging            received shards, and copies of shards, while a bucket is sent over a network
Law: `torch_kit/memory.py` counts the same bytes on a host, except for alignment, flags and scalars.

Not counted: frozen weights and buffers of the model, and the state of a codec.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.rules.unshard_order import MAX_UNSHARDED, NUM_STAGING_BUFFERS
from fourfold.axes.data.rules.zero import (
    NUM_GRAD_BUFFERS,
    RESTING_LAYOUTS,
    RestingLayouts,
    ShardGroups,
    grad_buffer_indices,
    layout_changes,
)
from fourfold.plan.plan import Plan
from fourfold.plan.precision import MASTER_BYTES, gradient_bucket, has_master_weights
from fourfold.words.layout import SPLIT, Change

# Reductions to split layouts; each holds a received copy of its bucket until it ends.
MAX_REDUCTIONS_IN_FLIGHT = 4


class HostRanks(NamedTuple):
    """The data ranks of one host, which may share memory. Every host has the same number."""

    num_ranks: int
    shard_groups: ShardGroups
    has_shared_memory: bool

    @property
    def num_shards(self) -> int:
        """The number of shards of what rests split. With shared memory, every rank of the host has its own shard."""
        size = self.shard_groups.shard_size
        return max(self.num_ranks, size) if self.has_shared_memory else size

    @property
    def unshards_params(self) -> bool:
        """Whether ranks must gather weights that rest split, since they cannot read all shards in shared memory."""
        return self.num_shards > (self.num_ranks if self.has_shared_memory else 1)


class HostMemoryUse(NamedTuple):
    """Bytes of all ranks of a host together.

    gathered  buffers for weights that rest split, while they are used
    masters   master weights: the copy of the weights that the update changes
    """

    weights: float
    gathered: float
    masters: float
    gradients: float
    states: float
    staging: float

    @property
    def total(self) -> float:
        return sum(self)


class BucketBytes(NamedTuple):
    """Bytes per element of a bucket. `master` is 0 without master weights, `local_sgd_state` without local SGD."""

    num_elements: int
    weight: int
    gradient: int
    master: int
    state: int
    local_sgd_state: int = 0


def has_unbucketed_grads(plan: Plan) -> bool:
    """Whether gradients stay in `.grad`: a rank has all of a stage, without codec, conversion, offload or local SGD."""
    keeps_dtypes = plan.precision == plan.reduce_dtype == "keep"
    is_alone = plan.mesh.size == plan.pp
    return is_alone and keeps_dtypes and (plan.sync, plan.codec, plan.offload) == ("step", "none", "none")


def bytes_per_element(
    buckets: Sequence[Bucket], plan: Plan, *, num_states: Sequence[int], original_bytes: Mapping[str, int]
) -> list[BucketBytes]:
    """The bytes per element of each bucket.

    num_states      by optimizer group: the number of tensors of optimizer state per parameter
    original_bytes  by parameter: bytes of an element in the dtype in which the user made it
    """
    result, is_unbucketed = [], has_unbucketed_grads(plan)
    for bucket in buckets:
        master = 0
        if has_master_weights(bucket, plan.precision):
            master = max(MASTER_BYTES, *(original_bytes[slot.name] for slot in bucket.slots))
        state = num_states[bucket.param_group] * (master or bucket.element_bytes)
        gradient = 0 if is_unbucketed else gradient_bucket(bucket, plan.reduce_dtype).element_bytes
        local = (1 + bool(plan.outer_momentum)) * bucket.element_bytes if plan.sync == "local" else 0
        result.append(BucketBytes(bucket.size, bucket.element_bytes, gradient, master, state, local))
    return result


def host_memory_use(buckets: Sequence[BucketBytes], *, zero: int, host: HostRanks) -> HostMemoryUse:
    """The bytes that the ranks of a host hold, at most: with updates in backward, less may be staged at a time."""
    rest = RESTING_LAYOUTS[zero if host.shard_groups.shard_size > 1 else 0]
    split, gathers = rest.state == SPLIT, rest.weight == SPLIT and host.unshards_params
    # How many times the host's ranks together hold all states, all gradient shards and all weights.
    states = host.num_ranks / host.num_shards if split else host.num_ranks
    shards = host.num_ranks / host.num_shards if rest.gradient == SPLIT else 0
    weights = states if gathers else 1 if split and host.has_shared_memory else host.num_ranks
    buffers = _grad_buffer_bytes([b.num_elements * b.gradient for b in buckets], is_cyclic=rest.gradient == SPLIT)
    return HostMemoryUse(
        weights=sum(b.num_elements * (b.weight * weights + b.local_sgd_state * host.num_ranks) for b in buckets),
        gathered=_unsharded_bytes(buckets, host) if gathers else 0,
        masters=sum(b.num_elements * b.master for b in buckets) * states,
        gradients=buffers * host.num_ranks + sum(b.num_elements * b.gradient for b in buckets) * shards,
        states=sum(b.num_elements * b.state for b in buckets) * states,
        staging=_staging_bytes(buckets, rest, host) if split and host.unshards_params else 0,
    )


def _grad_buffer_bytes(lengths: Sequence[int], *, is_cyclic: bool) -> int:
    """Bytes of one rank's gradient buffers: one that buckets share is as long as the longest of them."""
    buffers: dict[int, int] = {}
    for index, length in zip(grad_buffer_indices(len(lengths), is_cyclic=is_cyclic), lengths, strict=True):
        buffers[index] = max(buffers.get(index, 0), length)
    return sum(buffers.values())


def _unsharded_bytes(buckets: Sequence[BucketBytes], host: HostRanks) -> int:
    """Bytes of a host's buffers for unsharded buckets.

    Every rank holds MAX_UNSHARDED buckets and one that is being gathered; staging buffers exist once per host.
    """
    largest = max((b.num_elements * b.weight for b in buckets), default=0)
    per_rank = min(len(buckets), MAX_UNSHARDED + 1)
    return largest * (per_rank * host.num_ranks + NUM_STAGING_BUFFERS * host.has_shared_memory)


def _staging_bytes(buckets: Sequence[BucketBytes], rest: RestingLayouts, host: HostRanks) -> float:
    """Bytes in flight at a host's ranks: addends that a rank receives, and copies of its shards of the weights.

    With shared memory each rank sends its slice of a bucket, and only addends that share a gradient buffer wait for
    each other.
    """
    num_slices, in_flight = (host.num_ranks, len(buckets)) if host.has_shared_memory else (1, MAX_REDUCTIONS_IN_FLIGHT)
    grads_in_flight = min(in_flight, NUM_GRAD_BUFFERS) if rest.gradient == SPLIT else in_flight
    addends = [b.num_elements * b.gradient / num_slices for b in buckets]
    shards = [b.num_elements * b.weight / host.num_shards for b in buckets]
    copies = 0 if layout_changes(rest).after_update == Change.NONE else _in_flight_bytes(shards, in_flight)
    return (_in_flight_bytes(addends, grads_in_flight) + copies) * host.num_ranks


def _in_flight_bytes(lengths: Sequence[float], num_in_flight: int) -> float:
    """Bytes of at most `num_in_flight` consecutive buffers at a time; a free buffer is reused for an equal length."""
    windows = [lengths[first : first + num_in_flight] for first in range(len(lengths))]
    return sum(length * max(window.count(length) for window in windows) for length in set(lengths))
