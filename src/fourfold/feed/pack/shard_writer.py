"""Shard writer: one shard's records to its file, and what a later run needs to know of it.

note    `shard-00000.note`, written when the shard is on the disk: its entries and its digest
Law: a shard with a note is whole; a packing that is killed writes the shards again that have none.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from fourfold.environment.atomic_file import PARTIAL_SUFFIX, write_atomically
from fourfold.feed.pack.layout import ENTRY, ShardInfo, shard_name
from fourfold.feed.pack.values import Part

FLUSH_BYTES, MAX_PARTS = 4 * 2**20, 512  # IOV_MAX is 1024
ZEROS = bytes(2**16)


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a shard is."""

    info: ShardInfo
    max_record_bytes: int
    entries: bytes
    entries_digest: str


class WrittenShard(NamedTuple):
    """A shard that is on the disk: ENTRY [records]."""

    info: ShardInfo
    max_record_bytes: int
    entries: np.ndarray


class ShardWriter:
    """Writes one shard. `add` each record, then `commit`; or `abandon`."""

    def __init__(self, folder: Path, number: int, alignment: int) -> None:
        self._path, self._alignment = folder / shard_name(number), alignment
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._entries: list[tuple[int, int, int]] = []
        self._max_record_bytes = 0
        self.num_bytes = 0

    @property
    def num_records(self) -> int:
        return len(self._entries)

    def add(self, parts: Sequence[Part], record_bytes: int) -> None:
        """Write a record, as it is stored. `record_bytes`: its length before compression."""
        parts = [bytes(part) for part in parts]  # a source may reuse the memory of its samples
        if len(parts) == 1:
            digest = xxhash.xxh3_64_intdigest(parts[0])
        else:
            hasher = xxhash.xxh3_64()
            for part in parts:
                hasher.update(part)
            digest = hasher.intdigest()
        length = sum(map(len, parts))
        self._entries.append((self.num_bytes, length, digest))
        self._max_record_bytes = max(self._max_record_bytes, record_bytes)
        self._pending += parts
        if padding := -length % self._alignment:
            self._pending.append(ZEROS[:padding])
        self.num_bytes += length + padding
        self._num_pending_bytes += length + padding
        if self._num_pending_bytes >= FLUSH_BYTES or len(self._pending) >= MAX_PARTS:
            self._flush()

    def _flush(self) -> None:
        content = b"".join(self._pending)  # one write: parts are small, or copied faster than written
        self._pending, self._num_pending_bytes = [], 0
        self._digest.update(content)
        view = memoryview(content)
        while view:
            view = view[os.write(self._file, view) :]

    def commit(self) -> WrittenShard:
        """The shard, on the disk under its name."""
        self._flush()
        os.fsync(self._file)
        self.close()
        self._partial.replace(self._path)
        info = ShardInfo(len(self._entries), self.num_bytes, self._digest.hexdigest())
        entries = np.array(self._entries, dtype=ENTRY)
        content = entries.tobytes()
        note = Note(info, self._max_record_bytes, content, xxhash.xxh3_128_hexdigest(content))
        write_atomically(note_path(self._path), msgspec.msgpack.encode(note), durable=True)
        return WrittenShard(info, self._max_record_bytes, entries)

    def close(self) -> None:
        """Give up the file; without `commit` the shard will be written again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def note_path(path: Path) -> Path:
    """The note of the shard at `path`."""
    return path.with_suffix(".note")


def read_note(folder: Path, number: int) -> WrittenShard | None:
    """A shard that an earlier packing has written; None if it has to be written again."""
    path = folder / shard_name(number)
    try:
        note = msgspec.msgpack.decode(note_path(path).read_bytes(), type=Note)
        size = path.stat().st_size
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    is_whole = xxhash.xxh3_128_hexdigest(note.entries) == note.entries_digest and size == note.info.num_bytes
    if not is_whole or len(note.entries) != note.info.num_records * ENTRY.itemsize:
        return None
    return WrittenShard(note.info, note.max_record_bytes, np.frombuffer(note.entries, dtype=ENTRY))
