"""Plan of a packing: what was decided when it began, so that a later run of it goes on in the same way.

Law: two runs of a packing have the same plan, or the second is refused.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from fourfold.environment.atomic_file import write_atomically
from fourfold.feed.pack.schema import Schema
from fourfold.feed.pack.values import Encoder
from fourfold.feed.pack.zstd import Compression
from fourfold.words.errors import DataError, Problem

PLAN_FILE = "packing.json"


class PackingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a source is packed.

    num_samples        None: not known before the source has ended
    samples_per_shard  of all shards but the last; None: a shard ends when it has shard_bytes
    """

    schema: Schema
    alignment: int
    compression: Compression
    shard_bytes: int
    num_samples: int | None
    samples_per_shard: int | None
    source: str
    fingerprint: str

    @property
    def num_shards(self) -> int:
        """With samples_per_shard."""
        assert self.num_samples is not None
        assert self.samples_per_shard is not None
        return -(-self.num_samples // self.samples_per_shard)

    def samples_of(self, shard: int) -> range:
        assert self.num_samples is not None
        assert self.samples_per_shard is not None
        start = shard * self.samples_per_shard
        return range(start, min(start + self.samples_per_shard, self.num_samples))


def agree(plan: PackingPlan, folder: Path) -> PackingPlan:
    """The plan in the folder of the packing, or this one, which is put there. Raises DataError if they differ."""
    path = folder / PLAN_FILE
    if not path.exists():
        write_atomically(path, msgspec.json.encode(plan), durable=True)
        return plan
    try:
        begun = msgspec.json.decode(path.read_bytes(), type=PackingPlan)
    except msgspec.MsgspecError as error:
        problem = Problem(f"{path}: {error}", "the plan of a packing", f"rm -r {folder}, to begin again")
        raise DataError(problem) from None
    if problems := [Problem(each, attempt=f"rm -r {folder}, to begin again") for each in _differences(begun, plan)]:
        raise DataError(problems, where=f"{folder}, a packing that was not finished")
    return begun


def _differences(begun: PackingPlan, plan: PackingPlan) -> Iterator[str]:
    for name in PackingPlan.__struct_fields__:
        before, now = getattr(begun, name), getattr(plan, name)
        if before != now and name == "schema":
            before, now = (", ".join(f"{each.name} {each.describe()}" for each in it.fields) for it in (before, now))
        if before != now:
            yield f"{name} = {str(before)[:80]} then, {str(now)[:80]} now"


def fingerprint_of(samples: Sequence[Any], schema: Schema, num_samples: int | None) -> str:
    """A digest of some samples and of how many there are: by it a packing that goes on knows its source again."""
    digest, encoder = xxhash.xxh3_128(str(num_samples).encode()), Encoder(schema)
    for number, sample in enumerate(samples):
        for part in encoder.encode(sample, f"sample {number}"):
            digest.update(part)
    return digest.hexdigest()
