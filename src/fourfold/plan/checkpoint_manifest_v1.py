"""Version 1 of the checkpoint manifest: read, and turned into one of the present version; never written.

title  a tensor's name: model.NAME, ema.NAME, outer.NAME, optimizer.NAME.KEY, worker.NAME.KEY, codec.NAME.KEY
flat   its boxes are of the tensor viewed in one dim, so that one may begin within a row
rows   worker.… (states of local steps) and codec.…: the tensors of all ranks end to end, each in its rank's file
Law: what was saved is restored, bit for bit; `manifest_problems` then checks it like any other manifest.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from fourfold.plan.checkpoint_boxes import Box, whole
from fourfold.plan.checkpoint_manifest import (
    MANIFEST_VERSION,
    DataState,
    FileEntry,
    FirstStepRecord,
    Manifest,
    RngState,
    Scalars,
    StoredPart,
    TensorEntry,
    TensorKind,
    place_of,
)
from fourfold.plan.decode import DecodeError
from fourfold.words.mesh import AXES, Mesh

_ROWS = {"worker": TensorKind.OPTIMIZER, "codec": TensorKind.CODEC}


class StoredBoxV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class TensorEntryV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor, and the boxes that are stored of it."""

    dtype: str
    shape: tuple[int, ...]
    stretches: tuple[StoredBoxV1, ...]
    flat: bool = False


class RngStateV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one rank's generators."""

    cpu: str
    device: str = ""


class ManifestV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `Manifest`, but: tensors by title, aliases by title, random states by rank."""

    version: int
    step: int
    tensors: dict[str, TensorEntryV1]
    aliases: dict[str, str]
    scalars: Scalars
    groups: tuple[dict[str, Any], ...]
    record: FirstStepRecord
    feed: DataState
    random: tuple[RngStateV1, ...]
    metrics_bytes: int
    losses: tuple[float | None, ...]
    valid: dict[str, float | None]
    best: float | None
    files: dict[str, FileEntry]
    mesh: Mesh | None = None
    optimizer: str | None = None


def upgrade(old: ManifestV1) -> Manifest:
    """The manifest in the present version. Raises DecodeError for what no Fourfold has written."""
    mesh = old.mesh or Mesh(dp=len(old.random))
    if any(mesh.axis_size(axis) < 1 for axis in AXES) or mesh.size != len(old.random):
        raise DecodeError(f"a mesh of {mesh.size} ranks, and random states of {len(old.random)}")
    fields = {name: getattr(old, name) for name in old.__struct_fields__}
    fields["version"] = MANIFEST_VERSION
    fields["tensors"] = tuple(each for title, entry in old.tensors.items() for each in _entries(title, entry, mesh))
    fields["aliases"] = {_model_name(a): _model_name(b) for a, b in old.aliases.items()}
    # One state for each place. Without a recorded mesh it may be any rank's: see `rng_state_to_restore`.
    ranks = [rank for rank in range(mesh.size) if rank == mesh.peers(rank, "sp", "tp")[0]]
    fields["random"] = tuple(
        RngState(old.random[rank].cpu, old.random[rank].device, place_of(mesh, rank, "pp", "dp")) for rank in ranks
    )
    return Manifest(**fields)


def _model_name(title: str) -> str:
    kind, _, name = title.partition(".")
    if kind != TensorKind.MODEL:
        raise DecodeError(f"an alias of {title!r}")
    return name


def _entries(title: str, entry: TensorEntryV1, mesh: Mesh) -> Iterator[TensorEntry]:
    prefix, _, name = title.partition(".")
    if prefix in _ROWS:
        yield from _row_entries(title, entry, mesh)
        return
    if prefix not in (TensorKind.MODEL, TensorKind.EMA, TensorKind.OUTER, TensorKind.OPTIMIZER):
        raise DecodeError(f"a tensor called {title!r}")
    name, _, key = name.rpartition(".") if prefix == TensorKind.OPTIMIZER else (name, "", "")
    parts = tuple(_stored_part(title, entry, stored) for stored in entry.stretches)
    yield TensorEntry(TensorKind(prefix), name, entry.dtype, entry.shape, parts, key)


def _stored_part(title: str, entry: TensorEntryV1, stored: StoredBoxV1) -> StoredPart:
    if not entry.flat:
        box = Box(stored.offsets, stored.lengths)
        return StoredPart(stored.file, title, None if box == whole(entry.shape).box else box)
    if not len(stored.offsets) == len(stored.lengths) == 1:
        raise DecodeError(f"{title}: offsets {stored.offsets}, lengths {stored.lengths} in one dim")
    (start,), (length,) = stored.offsets, stored.lengths
    return StoredPart(stored.file, title, range=(start, start + length))


def _row_entries(title: str, entry: TensorEntryV1, mesh: Mesh) -> Iterator[TensorEntry]:
    """A tensor for each rank, from the rows of all ranks."""
    prefix, _, name = title.partition(".")
    name, _, key = name.rpartition(".")
    length = entry.shape[0] // mesh.size if len(entry.shape) == 1 else -1
    rows = {stored.offsets: stored for stored in entry.stretches}
    for rank in range(mesh.size):
        stored = rows.get((rank * length,))
        if stored is None or stored.lengths != (length,) or len(entry.stretches) != mesh.size or entry.flat:
            raise DecodeError(f"{title}: not a row for each of {mesh.size} ranks")
        place, part = place_of(mesh, rank, "dp", "sp"), StoredPart(stored.file, title)
        yield TensorEntry(_ROWS[prefix], name, entry.dtype, (length,), (part,), key, place)
