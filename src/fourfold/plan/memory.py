"""Memory, thought: the bytes a host's ranks hold of weights, gradients and optimizer states.

element  of a bucket: so many bytes as a weight, as a gradient, in the states; times the bucket's elements
held     long-lived: there from the first step to the last. Activations are not, nor is what an update uses in passing
staging  received shares and copies of shares, while a bucket is on its way over a network
Law: what `parts/memory.py` counts on a host is this, but for alignment, flags and scalars.

Not counted: frozen weights and buffers of the model, and what a codec remembers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.data import (
    NUM_GRAD_BUFFERS,
    RESTING_LAYOUTS,
    Bucket,
    RestingLayouts,
    ShardGroups,
    grad_buffer_indices,
    layout_changes,
)
from fourfold.plan.gathers import MAX_UNSHARDED, NUM_STAGING_BUFFERS
from fourfold.plan.plan import Plan
from fourfold.plan.precision import MASTER_BYTES, has_masters, reduced
from fourfold.words.layout import SPLIT, Change

# Of reductions to split layouts: each holds a received copy of its bucket until it has ended.
IN_FLIGHT = 4


class Host(NamedTuple):
    """Some of the data ranks, which may share memory. All hosts have as many."""

    ranks: int
    places: ShardGroups
    shares_memory: bool

    @property
    def shares(self) -> int:
        """In how many shares lies what rests split: where memory is shared, all of a host have one each."""
        return max(self.ranks, self.places.shard_size) if self.shares_memory else self.places.shard_size

    @property
    def gathers(self) -> bool:
        """Whether weights that rest split are not all on this host, or not where its ranks can read them."""
        return self.shares > (self.ranks if self.shares_memory else 1)


class Holding(NamedTuple):
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


class Element(NamedTuple):
    """Bytes that each of a bucket's `num` elements takes; `masters` and what is `kept` (local steps) may be 0."""

    num: int
    weight: int
    gradient: int
    master: int
    state: int
    kept: int = 0


def is_in_place(plan: Plan) -> bool:
    """Whether gradients stay where autograd leaves them: nobody sums, encodes, converts or keeps them."""
    numbers = plan.precision == plan.reduce == "keep"
    return plan.mesh.size == 1 and numbers and (plan.sync, plan.codec, plan.offload) == ("step", "none", "none")


def elements(
    buckets: Sequence[Bucket], plan: Plan, *, num_states: Sequence[int], own_bytes: Mapping[str, int]
) -> list[Element]:
    """What each bucket's elements take.

    `num_states`: by group, the tensors an update keeps. `own_bytes`: by parameter, of an element as the user made it.
    """
    result = []
    for bucket in buckets:
        master = 0
        if has_masters(bucket, plan.precision):
            master = max(MASTER_BYTES, *(own_bytes[slot.name] for slot in bucket.slots))
        state = num_states[bucket.param_group] * (master or bucket.element_bytes)
        gradient = 0 if is_in_place(plan) else reduced(bucket, plan.reduce).element_bytes
        kept = (1 + bool(plan.outer_momentum)) * bucket.element_bytes if plan.sync == "local" else 0
        result.append(Element(bucket.size, bucket.element_bytes, gradient, master, state, kept))
    return result


def holding(buckets: Sequence[Element], *, zero: int, host: Host) -> Holding:
    """What the ranks of a host hold, at most: updated in backward, less may be on its way at a time."""
    rest = RESTING_LAYOUTS[zero if host.places.shard_size > 1 else 0]
    split, gathers = rest.state == SPLIT, rest.weight == SPLIT and host.gathers
    # Of a host's ranks together, in wholes.
    states = host.ranks / host.shares if split else host.ranks
    shards = host.ranks / host.shares if rest.gradient == SPLIT else 0
    weights = states if gathers else 1 if split and host.shares_memory else host.ranks
    slots = _slots([b.num * b.gradient for b in buckets], few=rest.gradient == SPLIT)
    return Holding(
        weights=sum(b.num * (b.weight * weights + b.kept * host.ranks) for b in buckets),
        gathered=_gathered(buckets, host) if gathers else 0,
        masters=sum(b.num * b.master for b in buckets) * states,
        gradients=slots * host.ranks + sum(b.num * b.gradient for b in buckets) * shards,
        states=sum(b.num * b.state for b in buckets) * states,
        staging=_staging(buckets, rest, host) if split and host.gathers else 0,
    )


def _slots(lengths: Sequence[int], *, few: bool) -> int:
    """Bytes of one rank's gradient slots: those that take turns lie in the room of the largest of them."""
    room: dict[int, int] = {}
    for turn, length in zip(grad_buffer_indices(len(lengths), is_cyclic=few), lengths, strict=True):
        room[turn] = max(room.get(turn, 0), length)
    return sum(room.values())


def _gathered(buckets: Sequence[Element], host: Host) -> int:
    """Bytes of a host's room for whole buckets: each rank holds some beside one that comes; stages are there once."""
    largest = max(b.num * b.weight for b in buckets)
    return largest * (min(len(buckets), MAX_UNSHARDED + 1) * host.ranks + NUM_STAGING_BUFFERS * host.shares_memory)


def _staging(buckets: Sequence[Element], rest: RestingLayouts, host: Host) -> float:
    """Bytes of what is on its way at a host's ranks: addends of what a rank sums, and copies of its shares of weights.

    Where memory is shared each rank sends its slice. Then only addends that take turns in a slot wait for each other.
    """
    parts, several = (host.ranks, len(buckets)) if host.shares_memory else (1, IN_FLIGHT)
    turned = min(several, NUM_GRAD_BUFFERS) if rest.gradient == SPLIT else several
    addends = [b.num * b.gradient / parts for b in buckets]
    shares = [b.num * b.weight / host.shares for b in buckets]
    copies = 0 if layout_changes(rest).after_update == Change.NONE else _in_flight(shares, several)
    return (_in_flight(addends, turned) + copies) * host.ranks


def _in_flight(lengths: Sequence[float], several: int) -> float:
    """Bytes of so many in a row at a time; room that has been used is used again for what is as long."""
    windows = [lengths[first : first + several] for first in range(len(lengths))]
    return sum(length * max(window.count(length) for window in windows) for length in set(lengths))
