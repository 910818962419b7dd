"""Open files of a pack, and what is read of them.

place   where the files are: a folder, or an origin with copies on this node (`pack/reader.py`)
record  where a sample is: its shard, offset, stored length and digest
Law: a file is closed when it is neither in the pool nor in use; a process has at most `MAX_OPEN` of a pack open.
"""

import functools
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from fourfold.feed.pack import layout
from fourfold.feed.pack.layout import read_manifest
from fourfold.feed.position import Expected
from fourfold.feed.unpacked import check_batch_fits, check_fits
from fourfold.words.errors import DamagedSample, DataError, Problem, os_error_text

MAX_OPEN = 256


class ShardReader(Protocol):
    """A shard that can be read."""

    def preadv(self, parts: Sequence[memoryview], offset: int, /) -> int:
        """Fill the parts with what is at an offset; how many bytes, fewer at the end of the shard."""
        ...


class PackPlace(Protocol):
    """The files of a pack. `name`: for people. `index`: [samples] of `layout.ENTRY`."""

    @property
    def name(self) -> str: ...

    @property
    def manifest(self) -> layout.Manifest: ...

    @property
    def index(self) -> np.ndarray: ...

    def open(self, shard: int, /) -> ShardReader:
        """Raises DataError for a shard that cannot be opened."""
        ...

    def expect(self, batches: Iterable[Sequence[int]], /) -> Expected | None:
        """These shards will be read, batch after batch."""
        ...


class ShardFile:
    """A file that is open for reading, until nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "ShardFile":
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def preadv(self, parts: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self.descriptor, parts, offset)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the end of a process, `os` is gone
        close(self.descriptor)


class Record(NamedTuple):
    """Where a sample is."""

    sample: int
    file: ShardReader
    offset: int
    length: int
    digest: int


class LocalPlace:
    """The files of a pack in a folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.name, self.manifest = str(self.path), read_manifest(self.path)
        check_sizes(self.path, self.manifest)
        shape = (self.manifest.num_records,)
        index = np.memmap(self.path / layout.INDEX_FILE, dtype=layout.ENTRY, mode="r", shape=shape)
        self.index: np.ndarray = index.view(np.ndarray)
        self.open = functools.lru_cache(MAX_OPEN)(functools.partial(_open_shard, self.path))

    def expect(self, batches: Iterable[Sequence[int]]) -> None:
        return None


def _open_shard(folder: Path, shard: int) -> ShardFile:
    path = folder / layout.shard_name(shard)
    try:
        return ShardFile.open(path)
    except OSError as error:
        problem = Problem(f"{path}: {os_error_text(error)}", "a file that can be read")
        raise DataError(problem, where=str(folder)) from error


class PackFiles:
    """The manifest and the index of a pack, and its shards as they are needed."""

    def __init__(self, place: PackPlace) -> None:
        self._place, self.name, self.manifest = place, place.name, place.manifest
        counts = np.array([shard.num_records for shard in self.manifest.shards], dtype=np.int64)
        self.ends: np.ndarray = np.cumsum(counts)
        self._sizes = np.array([shard.num_bytes for shard in self.manifest.shards], dtype=np.uint64)
        self.index = place.index

    def place(self, sample: int) -> str:
        """The file and the record of a sample."""
        shard = int(np.searchsorted(self.ends, sample, side="right"))
        start = int(self.ends[shard - 1]) if shard else 0
        return f"{self.name}/{layout.shard_name(shard)}, record {sample - start}"

    def records(self, samples: Sequence[int] | np.ndarray) -> list[Record]:
        """Where samples are. Raises IndexError outside the pack, and DamagedSample for a damaged index."""
        numbers = np.asarray(samples, dtype=np.int64).reshape(-1)
        if not numbers.size:
            return []
        if numbers.min() < 0 or numbers.max() >= self.ends[-1]:
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} of a pack of {self.ends[-1]}")
        entries, shards = self.index[numbers], np.searchsorted(self.ends, numbers, side="right")
        wrong = layout.entry_problems(entries, self._sizes[shards], self.manifest)
        if wrong.any():
            number = int(numbers[int(wrong.argmax())])
            raise DamagedSample(self.place(number), "its entry in the index is damaged", where=self.name)
        self._check_fits(numbers, entries["length"])
        numbers_of_shards = shards.tolist()
        files = {shard: self._place.open(shard) for shard in set(numbers_of_shards)}
        opened = [files[shard] for shard in numbers_of_shards]
        columns = (entries[name].tolist() for name in ("offset", "length", "digest"))
        return list(map(Record, numbers.tolist(), opened, *columns))

    def _check_fits(self, numbers: np.ndarray, lengths: np.ndarray) -> None:
        """Raise an error for records that are larger than memory: a file with holes has them without such a disk."""
        longest = int(lengths.argmax())
        try:
            check_fits(int(lengths[longest]), "a record", times=2)  # and its values
        except ValueError as error:
            raise DamagedSample(self.place(int(numbers[longest])), str(error), where=self.name) from error
        check_batch_fits(int(lengths.sum()), f"a batch of {len(numbers)} records", self.name)

    def expect_batches(self, batches: Iterable[Sequence[int]]) -> Expected | None:
        """These samples will be read, batch after batch."""
        return self._place.expect(
            np.unique(np.searchsorted(self.ends, batch, side="right")).tolist() for batch in batches
        )

    def read(self, record: Record, parts: Sequence[memoryview]) -> None:
        """Fill the parts with a record, as it is stored. Raises DamagedSample if it is not what was packed."""
        try:
            done = record.file.preadv(parts, record.offset)
            if done != record.length:
                done = self._read_rest(record, parts, done)
        except OSError as error:
            raise DamagedSample(self.place(record.sample), os_error_text(error), where=self.name) from error
        if done != record.length:
            reason = f"its shard ends after {done} of its {record.length} bytes"
            raise DamagedSample(self.place(record.sample), reason, where=self.name)
        if len(parts) == 1:
            digest = xxhash.xxh3_64_intdigest(parts[0])
        else:
            hasher = xxhash.xxh3_64(parts[0])
            for part in parts[1:]:
                hasher.update(part)
            digest = hasher.intdigest()
        if digest != record.digest:
            reason = f"its xxh3_64 is {digest:016x}, not {record.digest:016x} as packed"
            raise DamagedSample(self.place(record.sample), reason, where=self.name)

    def _read_rest(self, record: Record, parts: Sequence[memoryview], done: int) -> int:
        """Go on after a read that was cut short, as one of more than 2 GiB is."""
        start = 0
        for part in parts:
            while start <= done < start + len(part):
                count = record.file.preadv([part[done - start :]], record.offset + done)
                if not count:
                    return done
                done += count
            start += len(part)
        return done


def check_sizes(path: Path, manifest: layout.Manifest) -> None:
    """Raise DataError, with all problems, for files that are missing or not as long as the manifest says."""
    expected = {layout.shard_name(number): shard.num_bytes for number, shard in enumerate(manifest.shards)}
    expected[layout.INDEX_FILE] = manifest.num_records * layout.ENTRY.itemsize
    problems = []
    for name, need in expected.items():
        try:
            found = (path / name).stat()
            got = f"{name} of {found.st_size} bytes" if found.st_size != need else None
            if not stat.S_ISREG(found.st_mode):
                got = f"{name}, which is no regular file"
        except OSError as error:
            got = f"{name}: {os_error_text(error)}"
        if got is not None:
            problems.append(Problem(got, f"{need} bytes, as packed", "the file from its origin, or packed again"))
    if problems:
        raise DataError(problems, where=str(path))
