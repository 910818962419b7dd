"""Layout: the files of a pack, and what its manifest and index say. No torch: that a pack is not there is said at once.

shard     `shard-00000.data`: records, each at a multiple of `alignment`; zeros between them
entry     a row of the file `index`: offset and stored length of a record in its shard, and its xxh3_64
manifest  `manifest.json`: schema, alignment, compression, and of each shard its number of records, its size and its
          xxh3_128; also the index's. In a frame with its own xxh3_128
stored    as in the file: compressed, if the pack is
Law: the manifest is one sequence of bytes: any other, with a space more or a key in another place, is damaged. It names
no file; names follow from numbers.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from fourfold.feed.pack.schema import MAX_RECORD_BYTES, Schema, schema_problems
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.words.errors import DataError, Problem, first_line, os_error_text

VERSION = 1
MANIFEST_FILE, INDEX_FILE = "manifest.json", "index"
MAX_MANIFEST_BYTES, MAX_SHARDS, MAX_SHARD_BYTES = 2**28, 10**6, 2**50
MAX_ALIGNMENT = 2**16
ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8"), ("digest", "<u8")])
LARGE_RECORD_BYTES, LARGE_ALIGNMENT, SMALL_ALIGNMENT = 2**16, 4096, 64
DIGEST = re.compile(r"[0-9a-f]{32}")


class ShardInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A shard: its records, the bytes of its file, and their xxh3_128."""

    num_records: int
    num_bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pack is. `source`: what was packed, for people. `fingerprint`: of that, to tell another source."""

    version: int
    schema: Schema
    alignment: int
    compression: Literal["none", "zstd"]
    max_record_bytes: int
    index_digest: str
    shards: tuple[ShardInfo, ...]
    source: str
    fingerprint: str

    @property
    def num_records(self) -> int:
        return sum(shard.num_records for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    xxh3_128: str
    manifest: Manifest


def shard_name(number: int) -> str:
    """The file of a shard's records."""
    return f"shard-{number:05}.data"


def alignment_for(record_bytes: float) -> int:
    """Whole pages for large records, so that they can be read past the page cache; cache lines for small ones."""
    return LARGE_ALIGNMENT if record_bytes >= LARGE_RECORD_BYTES else SMALL_ALIGNMENT


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of the manifest's file."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Frame(xxhash.xxh3_128_hexdigest(body), manifest)) + b"\n"


def decode_manifest(content: bytes, where: str) -> Manifest:
    """The manifest. Raises DataError if it is damaged, of another version, or claims what cannot be."""
    attempt = "the pack from its origin, or packed again"
    try:
        version = msgspec.json.decode(content, type=dict[str, Any])["manifest"]["version"]
        if version != VERSION:
            problem = Problem(f"a pack of version {version!r}", f"version {VERSION}", "a newer Fourfold")
            raise DataError(problem, where=where)
        manifest = msgspec.json.decode(content, type=_Frame).manifest
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            Problem(f"a manifest that cannot be read: {first_line(error)}", attempt=attempt), where=where
        ) from None
    if encode_manifest(manifest) != content:
        raise DataError(Problem("a damaged manifest", "the content that its digest is of", attempt), where=where)
    if problems := list(manifest_problems(manifest)):
        raise DataError([Problem(each, attempt=attempt) for each in problems], where=where)
    return manifest


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """What a manifest claims that cannot be."""
    yield from schema_problems(manifest.schema)
    alignment = manifest.alignment
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        yield f"alignment {alignment}"
    if not 1 <= len(manifest.shards) <= MAX_SHARDS:
        yield f"{len(manifest.shards)} shards, of 1 to {MAX_SHARDS}"
    if not 0 <= manifest.max_record_bytes <= MAX_RECORD_BYTES:
        yield f"records of {manifest.max_record_bytes} bytes"
    if not DIGEST.fullmatch(manifest.index_digest):
        yield "no digest of the index"
    for number, shard in enumerate(manifest.shards):
        if shard.num_records < 1 or not 0 <= shard.num_bytes <= MAX_SHARD_BYTES or not DIGEST.fullmatch(shard.digest):
            yield f"{shard_name(number)} with {shard.num_records} records in {shard.num_bytes} bytes"


def entry_problems(entries: np.ndarray, sizes: np.ndarray, manifest: Manifest) -> np.ndarray:
    """Which entries cannot be right, given the sizes of their shards: bool [B]. Nothing overflows."""
    offsets, lengths = entries["offset"], entries["length"]
    sizes = sizes.astype(np.uint64)
    wrong = (offsets > sizes) | (lengths > sizes) | (offsets % np.uint64(manifest.alignment) != 0)
    wrong |= lengths > sizes - np.minimum(offsets, sizes)
    record_bytes = manifest.schema.record_bytes
    if manifest.compression == "none":
        if record_bytes is not None:
            wrong |= lengths != np.uint64(record_bytes)
        wrong |= lengths > np.uint64(manifest.max_record_bytes)
    return wrong


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pack. Raises DataError if there is none, or it is damaged."""
    file = path / MANIFEST_FILE
    try:
        content = read_bounded(file, max_bytes=MAX_MANIFEST_BYTES)
    except DecodeError as error:
        problem = Problem(f"{file}: {error}", "the manifest of a pack", "the pack from its origin, or packed again")
        raise DataError(problem, where=str(path)) from error
    except OSError as error:
        packing = path.with_name(path.name + ".part")
        if not path.exists() and packing.is_dir():
            got, attempt = f"{path} is being packed, or its packing was cut off", "fourfold feed pack again, to go on"
        else:
            got, attempt = f"{file}: {os_error_text(error)}", "fourfold feed pack SOURCE DEST, which makes a pack"
        raise DataError(Problem(got, "a pack that is whole", attempt), where="the pack") from error
    return decode_manifest(content, str(file))
