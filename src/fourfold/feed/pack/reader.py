"""Reader: a pack as a source.

fixed    a pack whose records all have one length, not compressed: they are read into the rows of a batch
stretch  consecutive samples of a batch, which one thread reads
Law: `pack.fetch(indices)` equals the stack of `pack[i]`, which are the samples that were packed; or it raises.

B batch
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from fourfold.feed.collate import collate_samples
from fourfold.feed.expected import Expected
from fourfold.feed.pack.buffers import BufferPool, PinnedBuffers
from fourfold.feed.pack.files import LocalPlace, PackFiles, PackPlace, Record
from fourfold.feed.pack.layout import Manifest
from fourfold.feed.pack.schema import Schema, build
from fourfold.feed.pack.staged import StagedPlace
from fourfold.feed.pack.values import DTYPES, decode
from fourfold.feed.pack.zstd import Codec
from fourfold.feed.source import empty_like
from fourfold.feed.staging.origin import open_origin, without_password
from fourfold.words.argument_checks import format_argument, int_problems
from fourfold.words.errors import DamagedSample, DataError, FourfoldError, Problem

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
        self._path = os.fspath(path)
        problems = int_problems("threads", threads, minimum=1, optional=True)
        if problems := problems + _cache_problems(self._path, cache, cache_bytes):
            raise DataError(problems, where="the pack")
        self._threads = threads or min(DEFAULT_THREADS, len(os.sched_getaffinity(0)))
        self._cache = None if cache is None else os.path.abspath(cache), cache_bytes
        self._files = PackFiles(_open_place(self._path, *self._cache))
        self._images = images
        self._buffers: BufferPool | PinnedBuffers = BufferPool()
        self._codec = Codec() if self.manifest.compression == "zstd" else None
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
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
        return _reopen, (path, self._threads, self._images, self._cache)

    def expect_batches(self, batches: Iterable[Sequence[int]], /) -> Expected:
        """These samples will be read, batch after batch: a feed says so, and their shards are copied ahead."""
        return self._files.expect_batches(batches)

    def pin_buffers(self) -> None:
        """From now on, read records into pinned memory: a feed whose batches go to a GPU says so."""
        self._buffers = PinnedBuffers()

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

        def read(start: int, stop: int) -> None:
            samples[start:stop] = [self._sample(record) for record in records[start:stop]]

        self._in_stretches(records, read)
        return collate_samples(samples, [record.sample for record in records])

    def _fetch_rows(self, records: Sequence[Record]) -> Any:
        """Records of one length: each field is read into its row of the batch."""
        batch = [self._buffers.lend(field.num_bytes * len(records)) for field in self.schema.fields]
        columns = [(memoryview(tensor.numpy()), field.num_bytes) for tensor, field in _zip(batch, self.schema)]
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
        values = [
            tensor.view(DTYPES[field.dtype]).reshape(len(records), *field.shape)
            for tensor, field in _zip(batch, self.schema)
        ]
        return build(self.schema, values)

    def _in_stretches(self, records: Sequence[Record], read: Callable[[int, int], None]) -> None:
        """Read records in threads; `read(start, stop)` reads some of them. Raises the first error in their order."""
        num_bytes = sum(record.length for record in records)
        count = max(1, min(self._threads, len(records), num_bytes // LEAST_STRETCH_BYTES))
        bounds = [len(records) * part // count for part in range(count + 1)]
        if count == 1:
            read(0, len(records))
        else:
            # This thread reads too: handing over and waiting costs more than one stretch.
            others = [self._executor().submit(read, *bounds[part : part + 2]) for part in range(1, count)]
            try:
                read(*bounds[:2])
            finally:
                errors = [other.exception() for other in others]
            for error in errors:
                if error is not None:
                    raise error
        self.bytes_read += num_bytes

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fourfold pack")
            self._pool_process = os.getpid()
        return self._pool

    def _sample(self, record: Record) -> Any:
        stored = np.empty(record.length, dtype=np.uint8)
        self._files.read(record, [stored.data])
        try:
            if self._codec is not None:
                stored = self._codec.decompress(stored, self.manifest.max_record_bytes)
            return decode(self.schema, stored, images=self._images)
        except FourfoldError:
            raise
        except ValueError as error:
            raise DamagedSample(self._files.place(record.sample), str(error), where=self._files.name) from error


def _open_place(path: str, cache: str | None, cache_bytes: int | None) -> PackPlace:
    if cache is None or cache_bytes is None:
        return LocalPlace(path)
    return StagedPlace(open_origin(path), cache, cache_bytes)


def _zip(batch: Sequence[Tensor], schema: Schema) -> Any:
    return zip(batch, schema.fields, strict=True)


def _reopen(path: str, threads: int, images: bool, cache: tuple[str | None, int | None]) -> Pack:
    return Pack(path, threads=threads, images=images, cache=cache[0], cache_bytes=cache[1])


def _cache_problems(path: str, cache: Any, cache_bytes: Any) -> list[Problem]:
    if cache is None and cache_bytes is None:
        if "://" not in path:
            return []
        return [Problem(f"{without_password(path)}, and no cache", "a folder for copies", ATTEMPT)]
    problems = [] if isinstance(cache, str | os.PathLike) else [Problem(format_argument("cache", cache), "a folder")]
    return problems + int_problems("cache_bytes", cache_bytes, minimum=1, attempt=ATTEMPT)
