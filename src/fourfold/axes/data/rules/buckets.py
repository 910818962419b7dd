"""Buckets: parameters whose gradients are reduced together, and whose weights are gathered together.

slot    one parameter's place in a bucket, [start, stop) in elements
bucket  consecutive slots in reverse order of definition, of one stage, one dtype, one optimizer group, on as many
        tensor ranks
Law: slots tile the bucket, padding only at the end, so every shard of it is one contiguous slice. What several tensor
ranks hold lies at the same place of the same bucket on each of them, so sums and codecs give it the same bits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.plan.param_spec import ParamSpec

# Elements. Every shard begins and ends at a cache line, so that no line has two writers.
SHARD_ALIGNMENT = 32


class Slot(NamedTuple):
    """One parameter's place in its bucket: [start, stop) in elements."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are communicated together: `size` elements; those after the last slot are padding."""

    index: int
    slots: tuple[Slot, ...]
    size: int
    dtype: str
    element_bytes: int
    param_group: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters, without the padding."""
        return self.slots[-1].stop * self.element_bytes


def make_buckets(specs: Sequence[ParamSpec], *, bucket_bytes: int, num_shards: int = 1) -> tuple[Bucket, ...]:
    """Fill buckets of at most `bucket_bytes`, padded to `num_shards` equal shards. `specs` are in order of definition.

    A parameter larger than `bucket_bytes` gets a bucket of its own. Buckets are filled in reverse order of definition
    and numbered by when their last parameter is placed, those of later stages first, so that the first bucket to be
    complete in backward is the first to be reduced. Every place of the tensor axis has the same parameters in a bucket,
    even if their shards differ in size: all run the same program.
    """
    local = {spec.name: spec for spec in specs}
    members_of = _bucket_members([spec.at(0) for spec in specs], bucket_bytes)
    return tuple(
        _bucket(index, [local[member.name] for member in members], num_shards)
        for index, members in enumerate(members_of)
    )


def _bucket_members(specs: Sequence[ParamSpec], bucket_bytes: int) -> list[list[ParamSpec]]:
    """The parameters of each bucket."""
    open_buckets: dict[tuple[int, str, int, int | None], list[ParamSpec]] = {}
    full: list[list[ParamSpec]] = []
    num_bytes = Counter[tuple[int, str, int, int | None]]()  # of the members of an open bucket
    for spec in reversed(specs):
        key = spec.stage, spec.dtype, spec.param_group, spec.num_replicas
        members = open_buckets.setdefault(key, [])
        if members and num_bytes[key] + spec.num_bytes > bucket_bytes:
            full.append(members)
            members = open_buckets[key] = []
            num_bytes[key] = 0
        members.append(spec)
        num_bytes[key] += spec.num_bytes
    position = {spec.name: index for index, spec in enumerate(reversed(specs))}
    full.extend(open_buckets.values())
    full.sort(key=lambda members: (-members[-1].stage, position[members[-1].name]))
    for members in full:
        if any(spec.shape[-1:] == (2,) for spec in members):  # complex numbers, perhaps: they begin at even offsets
            members.sort(key=lambda spec: spec.num_elements % 2)
    return full


# The least number of buckets between hosts, so that most of their communication overlaps with backward.
NUM_INTER_HOST_BUCKETS = 8
# Takes 42 ms at 100 Mbit/s, 4 ms at 1 Gbit/s: long enough that latency does not matter.
MIN_INTER_HOST_BUCKET_BYTES = 2**19


def effective_bucket_bytes(specs: Sequence[ParamSpec], bucket_bytes: int, *, is_inter_host: bool) -> int:
    """The size of buckets that `make_buckets` should use for a plan with `bucket_bytes`.

    Inside a host a reduction takes less time than a matrix product, and few buckets cost least. Between hosts, or with
    a codec, a small model would fit into one bucket and be sent only after backward, so its buckets are made smaller
    (`docs/measured-notes.md`, "Several hosts behind slow links").
    """
    if not is_inter_host:
        return bucket_bytes
    total = sum(spec.num_bytes for spec in specs)
    return min(bucket_bytes, max(MIN_INTER_HOST_BUCKET_BYTES, total // NUM_INTER_HOST_BUCKETS))


def _bucket(index: int, members: Sequence[ParamSpec], num_shards: int) -> Bucket:
    slots, start = [], 0
    for spec in members:
        slots.append(Slot(spec.name, start, start + spec.num_elements))
        start += spec.num_elements
    first = members[0]
    unit = num_shards * SHARD_ALIGNMENT if num_shards > 1 else 1
    size = -(-start // unit) * unit
    return Bucket(index, tuple(slots), size, first.dtype, first.element_bytes, first.param_group)
