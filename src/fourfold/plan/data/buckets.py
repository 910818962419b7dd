"""Buckets: parameters whose gradients are reduced together, and whose weights are gathered together.

slot    one parameter's place in a bucket, [start, stop) in elements
bucket  consecutive slots in reverse order of definition, one dtype, one optimizer group
Law: slots tile the bucket, padding only at the end, so every shard of it is one contiguous slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
