"""Staged files: the data set of an emulated training behind a slow origin, copied to this disk as packs are.

origin  the folder of the files, which delivers so many bytes a second, to all ranks together, as slow storage does;
        copies are made of it ahead of need, one for all accelerators
bucket  when the origin will have delivered all that was asked of it; shared by the ranks of a host
Law: copies, and what is read without one, pass the same bucket as the reads of an origin that is not staged. In any
interval it delivers at most rate × its length, and one read more: what is not used is lost.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import xxhash

from fourfold.feed.position import Expected
from fourfold.feed.staging.shard_cache import Shard, ShardCache
from fourfold.feed.staging.stager import Stager
from fourfold.words.task import Source
from fourfold_bench.source import DataShape, FileSource, Reads

# ---- the origin's rate -----------------------------------------------------------------------------------------------


class SharedTime(Protocol):
    """A time that several ranks read and change, and its lock: such as `multiprocessing.Value("d")`."""

    value: float

    def get_lock(self) -> AbstractContextManager[Any]: ...


class CountedSource(Source, Protocol):
    """A source that reads a whole batch at once, and counts what it reads from storage."""

    def fetch(self, indices: Sequence[int], /) -> Any: ...

    @property
    def bytes_read(self) -> int: ...


class TokenBucket:
    """The origin's rate, in bytes a second."""

    def __init__(self, rate: float, free_at: SharedTime) -> None:
        self.rate, self._free_at = rate, free_at

    def reserve(self, num_bytes: int, now: float) -> float:
        """When these bytes will have been delivered, on the clock of `now`."""
        with self._free_at.get_lock():
            self._free_at.value = max(now, self._free_at.value) + num_bytes / self.rate
            return self._free_at.value


class ThrottledSource:
    """A source behind a slow origin. `source.bytes_read` says what a read costs."""

    def __init__(self, source: CountedSource, bucket: TokenBucket) -> None:
        self._source, self._bucket = source, bucket
        self.bytes_read = 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> Any:
        return self._delivered(self._source.__getitem__, index)

    def fetch(self, indices: Sequence[int], /) -> Any:
        return self._delivered(self._source.fetch, indices)

    def _delivered(self, read: Any, what: Any) -> Any:
        before = self._source.bytes_read
        values = read(what)
        # One clock for all processes of a host.
        num_bytes = self._source.bytes_read - before
        ready = self._bucket.reserve(num_bytes, time.monotonic())
        time.sleep(max(0.0, ready - time.monotonic()))
        self.bytes_read += num_bytes
        return values


# ---- copies ----------------------------------------------------------------------------------------------------------


CHUNK_BYTES = 2**20


def list_shards(shape: DataShape, folder: Path) -> list[Shard]:
    """Each file with its digest, as the manifest of a pack has them."""
    return [_shard_of(path, number) for number, path in enumerate(shape.paths(folder))]


def _shard_of(path: Path, number: int) -> Shard:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return Shard(f"file-{number:06}", path.stat().st_size, digest.hexdigest())


class ThrottledOrigin:
    """The files of a data set as an origin of shards, held to a rate."""

    def __init__(self, shape: DataShape, folder: Path, bucket: TokenBucket | None) -> None:
        self.url, self._shape, self._folder, self._bucket = str(folder), shape, folder, bucket

    def path_of(self, number: int) -> Path:
        """A file of the data set."""
        return self._shape.path_of(self._folder, number)

    def wait(self, num_bytes: int) -> None:
        """Wait as long as the origin takes for so many bytes."""
        if self._bucket is not None:
            ready = self._bucket.reserve(num_bytes, time.monotonic())
            time.sleep(max(0.0, ready - time.monotonic()))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """A part of a shard."""
        with self.path_of(int(name.rpartition("-")[2])).open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        self.wait(len(content))
        return content

    def read_up_to(self, name: str, max_bytes: int) -> bytes:
        """A whole shard of at most so many bytes."""
        return self.read(name, 0, max_bytes)


class StagedFiles:
    """The samples of a data set, read from copies; from the origin where there is none yet. `cache`: their folder."""

    def __init__(self, origin: ThrottledOrigin, shards: Sequence[Shard], cache: Path, source: tuple[DataShape, Reads]):
        shape, reads = source
        self._origin, self._shards, self._per_file = origin, shards, shape.samples_per_file
        self._cache = ShardCache(cache, sum(shard.num_bytes for shard in shards))
        self._stagers: tuple[Stager, ...] = ()
        self._files = FileSource(shape, cache, reads, path_of=self._path_of)

    @property
    def bytes_read(self) -> int:
        """What samples have read, from copies or from the origin."""
        return self._files.bytes_read

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int, /) -> Any:
        return self._files[index]

    def fetch(self, indices: Sequence[int], /) -> Any:
        return self._files.fetch(indices)

    def expect_batches(self, batches: Iterable[Sequence[int]], /) -> Expected:
        """Copy the files of these batches, ahead of them."""
        stager = Stager(self._origin, self._shards, self._cache, self._files_of(batches))
        self._stagers = (*(each for each in self._stagers if not each.is_closed), stager)
        return stager

    def _files_of(self, batches: Iterable[Sequence[int]]) -> Iterator[list[int]]:
        for batch in batches:
            yield sorted({index // self._per_file for index in batch})

    def _path_of(self, number: int) -> Path:
        for stager in self._stagers:
            if stager.held(number, is_read_whole=self._per_file == 1) is not None:
                return self._cache.folder / self._shards[number].name
        self._origin.wait(self._shards[number].num_bytes // self._per_file)
        return self._origin.path_of(number)
