"""Reader: a pack as a source.

fixed    a pack whose records all have one length, not compressed: they are read into the rows of a batch
lent     a buffer that some tensor of a batch still uses
origin   a folder or a URL where a pack may be; the manifest is read from it when the pack is opened, the index is
         copied whole, and shards are read through copies on the node's own disk
cache    a folder of this node; each pack has one of its own in it, named by the digest of its manifest
Law: `pack.fetch(indices)` equals the stack of `pack[i]`, which are the samples that were packed; or it raises. What is
read equals what a local pack gives, wherever each shard is at the moment: one without a copy, because its turn has not
come or the disk is full, is read from the origin. A buffer is lent to one batch at a time: it comes back when no
tensor, view or array of the batch is left.

B batch
"""

import functools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from fourfold.feed.collate import collate_samples
from fourfold.feed.pack import layout
from fourfold.feed.pack.files import LocalPlace, PackFiles, Record, ShardFile, ShardReader
from fourfold.feed.pack.layout import Manifest
from fourfold.feed.pack.schema import Schema, build
from fourfold.feed.pack.values import DTYPES, decode
from fourfold.feed.pack.zstd import Codec
from fourfold.feed.position import Expected
from fourfold.feed.source import empty_like
from fourfold.feed.staging.origin import Origin, open_origin, without_password
from fourfold.feed.staging.shard_cache import CHUNK_BYTES, NoRoomError, Shard, ShardCache
from fourfold.feed.staging.stager import Stager
from fourfold.feed.stretches import StretchThreads
from fourfold.feed.unpacked import BatchBytes, bytes_of
from fourfold.words.argument_checks import format_argument, int_problems, str_problems
from fourfold.words.errors import DamagedSample, DataError, FourfoldError, Problem
from fourfold.words.noop import noop

# ---- memory of batches -----------------------------------------------------------------------------------------------


HUGE_PAGE = 2**21
MAX_FREE = 8  # of one size; a feed holds a few batches at a time


class _BufferPool:
    """Buffers by size. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}

    def lend(self, num_bytes: int) -> Tensor:
        """A tensor of memory with any content: uint8 [num_bytes]. The memory is lent until all views of it are gone."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = _rounded(num_bytes)
        free = self._free.setdefault(size, deque(maxlen=MAX_FREE))
        try:
            memory = free.pop()
        except IndexError:
            memory = _new(size)
        # Views of a tensor keep this array, not the map: when it goes, so has the last of them.
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array)[:num_bytes]


class _PinnedBuffers:
    """Buffers in pinned memory, from which copies to a GPU overlap with its work. torch keeps them for further use."""

    def lend(self, num_bytes: int) -> Tensor:
        """A tensor of pinned memory with any content: uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _rounded(num_bytes: int) -> int:
    """A size that batches of about this size share: an eighth more at most."""
    step = max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def _new(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


# ---- a pack at an origin ---------------------------------------------------------------------------------------------


log = logging.getLogger("fourfold")


class _OriginShard:
    """A shard without a copy."""

    def __init__(self, name: str, origin: Origin) -> None:
        self._name, self._origin = name, origin

    def preadv(self, parts: Sequence[memoryview], offset: int) -> int:
        length = sum(map(len, parts))
        content = memoryview(self._origin.read(self._name, offset, offset + length))
        start = 0
        for part in parts:
            part[:] = content[start : start + len(part)]
            start += len(part)
        return length


class _StagedPlace:
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

    def open(self, shard: int) -> ShardReader:
        """The shard's copy, or the shard at the origin. Waits for a copy that is being made."""
        copy = None
        if self._process == os.getpid():  # the stager's threads do not survive a fork
            # Opened again: what a stager holds may be closed while it is read.
            copy = next(filter(None, (stager.open(shard) for stager in self._stagers)), None)
        copy = copy or self._cache.open(self._shards[shard])
        # A copy that is open is not evicted.
        return ShardFile(copy.descriptor) if copy else _OriginShard(self._shards[shard].name, self._origin)

    def expect(self, batches: Iterable[Sequence[int]]) -> Expected:
        """Copy the shards of these batches, ahead of them."""
        stager = Stager(self._origin, self._shards, self._cache, batches)
        with self._lock:
            self._stagers = (*(each for each in self._stagers if not each.is_closed), stager)
        return stager

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


# ---- the source ------------------------------------------------------------------------------------------------------


DEFAULT_THREADS = 4
ATTEMPT = 'cache="/local/disk/cache", cache_bytes=100_000_000_000'
LEAST_STRETCH_BYTES = 2**20  # to hand less to another thread costs more than to read it


class Pack:
    """The samples of a pack at `path`, a folder or a URL that fsspec reads: a source.

    threads  that read, check and decode a batch; None: one for each core, at most 4
    images   decode images to uint8 [3, height, width]; else their bytes are the sample
    cache    a folder of this node's own disk: the shards that a feed will read are copied there ahead, at most
             `cache_bytes` of them, once for all processes of the node. A URL needs one

    Raises DataError if there is no pack, or its files are not as long as its manifest says; DamagedSample, when a
    sample is read, if its bytes are not what was packed.
    """

    thread_safe = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        images: bool = True,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if problems := str_problems("path", path, path=True):
            raise DataError(problems, where="the pack")
        self._path = os.fspath(path)
        problems = int_problems("threads", threads, minimum=1, optional=True)
        if problems := problems + _cache_problems(self._path, cache, cache_bytes):
            raise DataError(problems, where="the pack")
        self._threads = StretchThreads(threads or min(DEFAULT_THREADS, len(os.sched_getaffinity(0))), "fourfold pack")
        self._cache: Any = {"cache": None if cache is None else os.path.abspath(cache), "cache_bytes": cache_bytes}
        if cache is None or cache_bytes is None:
            self._files = PackFiles(LocalPlace(path))
        else:
            self._files = PackFiles(_StagedPlace(open_origin(self._path), cache, cache_bytes))
        self._images = images and any(field.kind == "image" for field in self.schema.fields)
        self._buffers: _BufferPool | _PinnedBuffers = _BufferPool()
        self._codec = Codec() if self.manifest.compression == "zstd" else None
        self.bytes_read = 0
        """What has been read of records."""

    @property
    def manifest(self) -> Manifest:
        return self._files.manifest

    @property
    def schema(self) -> Schema:
        return self.manifest.schema

    @property
    def shard_sizes(self) -> Sequence[int]:
        """How many samples each shard holds."""
        return [shard.num_records for shard in self.manifest.shards]

    def __len__(self) -> int:
        return self.manifest.num_records

    def __reduce__(self) -> tuple[Any, ...]:  # to a worker process goes the path, not what is open
        path = self._path if "://" in self._path else os.path.abspath(self._path)
        options: Any = {"threads": self._threads.num_threads, "images": self._images, **self._cache}
        return functools.partial(Pack, **options), (path,)

    def expect_batches(self, batches: Iterable[Sequence[int]], /) -> Expected | None:
        """These samples will be read, batch after batch: a feed says so, and their shards are copied ahead."""
        return self._files.expect_batches(batches)

    def pin_buffers(self) -> None:
        """From now on, read records into pinned memory: a feed whose batches go to a GPU says so."""
        self._buffers = _PinnedBuffers()

    def sample_key(self, index: int) -> str:
        """The file and the record of a sample."""
        return self._files.place(index)

    def __getitem__(self, index: int, /) -> Any:
        number = index + len(self) if index < 0 else index
        (record,) = self._files.records([number])
        return self._sample(record)

    def fetch(self, indices: Sequence[int], /) -> Any:
        """The batch of these samples, in this order; text and bytes as lists."""
        records = self._files.records(indices)
        if self.schema.record_bytes is not None and self._codec is None:
            return self._fetch_rows(records)
        if not records:
            return empty_like(collate_samples([self[0]], [0]))
        samples: list[Any] = [None] * len(records)
        reserve = BatchBytes(len(records), self._files.name).add

        def read(start: int, stop: int) -> None:
            samples[start:stop] = [self._sample(record, reserve) for record in records[start:stop]]

        self._in_stretches(records, read)
        return collate_samples(samples, [record.sample for record in records], key=self.sample_key)

    def _fetch_rows(self, records: Sequence[Record]) -> Any:
        """Records of one length: each field is read into its row of the batch."""
        batch = [self._buffers.lend(field.num_bytes * len(records)) for field in self.schema.fields]
        fields: list[Any] = list(zip(batch, self.schema.fields, strict=True))
        columns = [(memoryview(tensor.numpy()), field.num_bytes) for tensor, field in fields]
        read_record, xxh3_64 = self._files.read, xxhash.xxh3_64

        def read(start: int, stop: int) -> None:
            for row in range(start, stop):
                record = records[row]
                parts = [view[row * size : (row + 1) * size] for view, size in columns]
                # As `PackFiles.read` does, which is left to find out what is wrong: here each microsecond counts.
                done = record.file.preadv(parts, record.offset)
                hasher = xxh3_64(parts[0])
                for part in parts[1:]:
                    hasher.update(part)
                if done != record.length or hasher.intdigest() != record.digest:
                    read_record(record, parts)

        self._in_stretches(records, read)
        values = [tensor.view(DTYPES[field.dtype]).reshape(len(records), *field.shape) for tensor, field in fields]
        return build(self.schema, values)

    def _in_stretches(self, records: Sequence[Record], read: Callable[[int, int], None]) -> None:
        """Read records in threads; `read(start, stop)` reads some of them."""
        num_bytes = sum(record.length for record in records)
        count = max(1, min(self._threads.num_threads, len(records), num_bytes // LEAST_STRETCH_BYTES))
        self._threads.run(len(records), count, read)
        self.bytes_read += num_bytes

    def _sample(self, record: Record, reserve: Callable[[int], Any] = noop) -> Any:
        """A sample. `reserve` is called with the bytes of it, and of its row in a batch, before they are made."""
        reserve(record.length)
        stored = np.empty(record.length, dtype=np.uint8)
        self._files.read(record, [stored.data])
        try:
            if self._codec is not None:
                stored = self._codec.decompress(stored, self.manifest.max_record_bytes, reserve)
            reserve(2 * len(stored))
            sample = decode(self.schema, stored, images=self._images)
            if self._images:  # they are larger than their files
                reserve(2 * bytes_of(sample))
            return sample
        except FourfoldError:
            raise
        except ValueError as error:
            raise DamagedSample(self._files.place(record.sample), str(error), where=self._files.name) from error


def _cache_problems(path: str, cache: Any, cache_bytes: Any) -> list[Problem]:
    if cache is None and cache_bytes is None:
        if "://" not in path:
            return []
        return [Problem(f"{without_password(path)}, and no cache", "a folder for copies", ATTEMPT)]
    problems = [] if isinstance(cache, str | os.PathLike) else [Problem(format_argument("cache", cache), "a folder")]
    return problems + int_problems("cache_bytes", cache_bytes, minimum=1, attempt=ATTEMPT)
