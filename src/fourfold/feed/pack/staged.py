"""Staged: a pack at an origin, read through copies of its shards on the node's own disk.

origin   a folder or a URL; the manifest is read from it when the pack is opened, the index is copied whole
cache    a folder of this node; each pack has one of its own in it, named by the digest of its manifest
Law: what is read equals what a local pack gives, wherever each shard is at the moment. A shard without a copy, because
its turn has not come or the disk is full, is read from the origin.
"""

import logging
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from fourfold.feed.pack import layout
from fourfold.feed.staging.origin import Origin
from fourfold.feed.staging.shard_cache import CHUNK_BYTES, NoRoomError, Shard, ShardCache, StagedFile
from fourfold.feed.staging.stager import Stager
from fourfold.words.errors import DataError, Problem

log = logging.getLogger("fourfold")


class CopiedShard:
    """A shard of which this node has a copy. It is not evicted while something refers to this."""

    def __init__(self, number: int, copy: StagedFile) -> None:
        self.number, self._copy = number, copy

    def preadv(self, parts: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self._copy.descriptor, parts, offset)

    def __del__(self) -> None:
        self._copy.close()


class OriginShard:
    """A shard without a copy."""

    def __init__(self, number: int, origin: Origin) -> None:
        self.number, self._origin = number, origin

    def preadv(self, parts: Sequence[memoryview], offset: int) -> int:
        length = sum(map(len, parts))
        content = memoryview(self._origin.read(layout.shard_name(self.number), offset, offset + length))
        start = 0
        for part in parts:
            part[:] = content[start : start + len(part)]
            start += len(part)
        return length


class StagedBatches:
    """Batches of which the shards are copied."""

    def __init__(self, place: "StagedPlace", stager: Stager) -> None:
        self._place, self._stager = place, stager

    def advance(self) -> None:
        self._stager.advance()

    def close(self) -> None:
        self._place.end(self._stager)


class StagedPlace:
    """The files of a pack at an origin."""

    def __init__(self, origin: Origin, cache: str | os.PathLike[str], cache_bytes: int) -> None:
        """Raises DataError if there is no pack, or the cache cannot be written."""
        self._origin, self.name = origin, origin.url
        content = origin.read_up_to(layout.MANIFEST_FILE, layout.MAX_MANIFEST_BYTES)
        self.manifest = layout.decode_manifest(content, f"{self.name}/{layout.MANIFEST_FILE}")
        self._shards = [
            Shard(layout.shard_name(number), info.num_bytes, info.digest)
            for number, info in enumerate(self.manifest.shards)
        ]
        self._cache = ShardCache(Path(cache) / xxhash.xxh3_128_hexdigest(content), cache_bytes)
        self._stagers: tuple[Stager, ...] = ()
        """One for each loop over a feed, replaced as a whole: other threads read it."""
        self._lock, self._process = threading.Lock(), os.getpid()
        self.index = self._open_index()

    def open(self, shard: int) -> CopiedShard | OriginShard:
        """The shard's copy, or the shard at the origin. Waits for a copy that is being made."""
        if self._process == os.getpid():  # the stager's threads do not survive a fork
            for stager in self._stagers:
                # Opened again: what a stager holds may be closed while it is read.
                if (held := stager.open(shard)) is not None:
                    return CopiedShard(shard, held)
        copy = self._cache.open(self._shards[shard])
        return OriginShard(shard, self._origin) if copy is None else CopiedShard(shard, copy)

    def expect(self, batches: Iterable[Sequence[int]]) -> "StagedBatches":
        """Copy the shards of these batches, ahead of them."""
        stager = Stager(self._origin, self._shards, self._cache)
        with self._lock:
            self._stagers += (stager,)
        stager.expect(batches)
        return StagedBatches(self, stager)

    def end(self, stager: Stager) -> None:
        """Give up the copies that a stager holds."""
        with self._lock:
            self._stagers = tuple(each for each in self._stagers if each is not stager)
        stager.close()

    def _open_index(self) -> np.ndarray:
        """The index, mapped from its copy; in memory if there is no room for one."""
        shard = Shard(layout.INDEX_FILE, self.manifest.num_records * layout.ENTRY.itemsize, self.manifest.index_digest)
        try:
            self._index_copy = self._cache.copy(shard, self._origin.read)  # open as long as the pack
        except NoRoomError:
            log.warning(f"{self._cache.folder} has no room for the index of {self.name}: it is kept in memory")
            return np.frombuffer(self._read_whole(shard), dtype=layout.ENTRY)
        mapped = mmap.mmap(self._index_copy.descriptor, shard.num_bytes, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=layout.ENTRY)

    def _read_whole(self, shard: Shard) -> bytes:
        starts = range(0, shard.num_bytes, CHUNK_BYTES)
        stops = (min(start + CHUNK_BYTES, shard.num_bytes) for start in starts)
        content = b"".join(self._origin.read(shard.name, *span) for span in zip(starts, stops, strict=True))
        if (found := xxhash.xxh3_128_hexdigest(content)) != shard.digest:
            problem = Problem(f"{shard.name} with digest {found}", f"{shard.digest}, as its manifest says")
            raise DataError(problem, where=self.name)
        return content
