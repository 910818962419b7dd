"""Memory, thought: the bytes a host's ranks hold of weights, gradients and optimizer states.

element  of a bucket: so many bytes as a weight, as a gradient, in the states; times the bucket's elements
held     long-lived: there from the first step to the last. Activations are not, nor is what an update uses in passing
staging  received shares and copies of shares, while a bucket is on its way over a network
Law: what `parts/memory.py` counts on a host is this, but for alignment, flags and scalars.

Not counted: frozen weights and buffers of the model, and what a codec remembers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.data import RESTS, Bucket, turns
from fourfold.plan.plan import Plan
from fourfold.plan.precision import MASTER_BYTES, has_masters, reduced
from fourfold.words.layout import SPLIT

# Of reductions to split layouts: each holds a received copy of its bucket until it has ended.
IN_FLIGHT = 4


class Host(NamedTuple):
    """Some of the data ranks that share a model's state: `ranks` of `size`, and whether they share memory too."""

    ranks: int
    size: int
    shares_memory: bool


class Holding(NamedTuple):
    """Bytes on a host, of all its ranks together. `masters`: the update's own copy of the weights."""

    weights: float
    masters: float
    gradients: float
    states: float
    staging: float = 0.0

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
        state = num_states[bucket.group] * (master or bucket.element_bytes)
        gradient = 0 if is_in_place(plan) else reduced(bucket, plan.reduce).element_bytes
        kept = (1 + bool(plan.outer_momentum)) * bucket.element_bytes if plan.sync == "local" else 0
        result.append(Element(bucket.size, bucket.element_bytes, gradient, master, state, kept))
    return result


def holding(buckets: Sequence[Element], *, zero: int, host: Host) -> Holding:
    """What the ranks of a host hold. Zero 3 is that of ranks on one host, where weights exist once anyhow."""
    rest = RESTS[zero if host.size > 1 else 0]
    states = host.ranks / host.size if rest.state == SPLIT else host.ranks
    once = rest.state == SPLIT and host.shares_memory
    slots = _slots([b.num * b.gradient for b in buckets], few=rest.gradient == SPLIT)
    shards = sum(b.num * b.gradient for b in buckets) / host.size if rest.gradient == SPLIT else 0
    return Holding(
        weights=sum(b.num * (b.weight * (1 if once else host.ranks) + b.kept * host.ranks) for b in buckets),
        masters=sum(b.num * b.master for b in buckets) * states,
        gradients=(slots + shards) * host.ranks,
        states=sum(b.num * b.state for b in buckets) * states,
        staging=_staging(buckets, host.size) * host.ranks if rest.state == SPLIT and not host.shares_memory else 0,
    )


def _slots(lengths: Sequence[int], *, few: bool) -> int:
    """Bytes of one rank's gradient slots: those that take turns lie in the room of the largest of them."""
    room: dict[int, int] = {}
    for turn, length in zip(turns(len(lengths), few=few), lengths, strict=True):
        room[turn] = max(room.get(turn, 0), length)
    return sum(room.values())


def _staging(buckets: Sequence[Element], size: int) -> float:
    """Bytes of what is on its way at a rank: whole buckets of addends, and shares of weights."""
    addends = [b.num * b.gradient for b in buckets]
    return _in_flight(addends) + _in_flight([b.num * b.weight / size for b in buckets])


def _in_flight(lengths: Sequence[float]) -> float:
    """At most IN_FLIGHT at a time; room that has been used is used again for what is as long."""
    windows = [lengths[first : first + IN_FLIGHT] for first in range(len(lengths))]
    return sum(length * max(window.count(length) for window in windows) for length in set(lengths))
