"""Row source: the rows of a database as samples, fetched by key in the order of the feed.

sample  a dict of the row's columns without the key; or a pair, if a `target` is named
number  of a sample: the place of its row in the order of the key, from 0
digest  xxh3_64 of a row's values, with their types
index   the keys of all rows and the digest of each, read once, in files that are mapped
Law: sample i is the row with the i-th key, with the values it had when the index was made, on every rank and after any
restart. A row that has changed since, or is gone, or has a value that its column cannot have, is no sample.

The files: `manifest.json`, written last, with what the index is of; `digests`, uint64 [N]; for keys that are whole
numbers `keys`, int64 [N]; for others `keys`, their UTF-8 bytes one behind the other, and `ends`, uint64 [N].
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import xxhash

from fourfold.environment.temporary_folder import temporary_folder
from fourfold.feed.rows.database import Columns, Database, Row, retried
from fourfold.feed.source import empty_like, make_batch
from fourfold.feed.staging.origin import Backoff, Result
from fourfold.feed.unpacked import check_batch_fits
from fourfold.plan.decode import DecodeError, from_json
from fourfold.words.errors import DamagedSample, DataError, Problem

# ---- the index -------------------------------------------------------------------------------------------------------


VERSION = 1
MAX_MANIFEST_BYTES = 2**16
INDEX_FILES = ("lock", "manifest.json", "manifest.part", "keys", "ends", "digests")


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    of: str
    num_rows: int
    are_keys_text: bool


class IndexedRow(NamedTuple):
    """A row's key, and the digest of its values."""

    key: Any
    digest: int


class RowIndex:
    """The index in a folder."""

    def __init__(self, folder: Path, manifest: _Manifest) -> None:
        self._folder, self._num_rows, self._are_keys_text = folder, manifest.num_rows, manifest.are_keys_text
        self._digests = _mapped(folder / "digests", np.uint64, self._num_rows)
        if manifest.are_keys_text:
            self._ends = _mapped(folder / "ends", np.uint64, self._num_rows)
            self._keys = _mapped(folder / "keys", np.uint8, int(self._ends[-1]) if self._num_rows else 0)
            if np.any(self._ends[1:] < self._ends[:-1]):
                raise _damaged(folder / "ends")
        else:
            self._keys = _mapped(folder / "keys", np.int64, self._num_rows)

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, numbers: Sequence[int]) -> list[IndexedRow]:
        """The keys and digests of some samples. Raises IndexError outside of them."""
        places = np.asarray(numbers, dtype=np.int64)
        if places.size and not (places.min() >= 0 and places.max() < self._num_rows):
            raise IndexError(f"samples {places.min()} to {places.max()} of {self._num_rows}")
        keys = map(self._text_key, numbers) if self._are_keys_text else self._keys[places].tolist()
        return [IndexedRow(key, digest) for key, digest in zip(keys, self._digests[places].tolist(), strict=True)]

    def _text_key(self, number: int) -> str:
        start = int(self._ends[number - 1]) if number else 0
        try:
            return self._keys[start : int(self._ends[number])].tobytes().decode()
        except UnicodeDecodeError:
            raise _damaged(self._folder / "keys") from None


def open_index(folder: Path, of: str, rows: Iterable[tuple[Any, int]]) -> RowIndex:
    """The index in a folder; made of `rows`, pairs (key, digest) in the order of the key, if there is none.

    Several processes may open it at once: one makes it, the others wait. `of` names what it is of. Raises DataError for
    an index of something else, a damaged one, no rows, and keys that are not unique, or neither whole numbers nor text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in INDEX_FILES:
        if (folder / name).is_fifo():  # opening it would wait for another process
            raise _damaged(folder / name)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "manifest.json").exists():
            _write(folder, of, rows)
        manifest = _read_manifest(folder / "manifest.json")
    if manifest.of != of:
        got = f"{folder}, the index of {manifest.of}"
        raise DataError(Problem(got, f"that of {of}", "another folder, or remove this one"), where="ff.sql")
    return RowIndex(folder, manifest)


def row_digest(row: Sequence[Any]) -> int:
    """The digest of a row: of the text of its values, then of its binary ones, whose lengths are in the text."""
    binary = [value for value in row if isinstance(value, bytes)]
    text = repr([("binary", len(value)) if isinstance(value, bytes) else value for value in row])
    if not binary:
        return xxhash.xxh3_64_intdigest(text.encode())
    digest = xxhash.xxh3_64(text.encode())
    for value in binary:
        digest.update(value)
    return digest.intdigest()


def _write(folder: Path, of: str, rows: Iterable[tuple[Any, int]]) -> None:
    with contextlib.ExitStack() as stack:
        keys, ends, digests = (stack.enter_context((folder / name).open("wb")) for name in ("keys", "ends", "digests"))
        manifest = _write_rows(rows, of, keys=keys, ends=ends, digests=digests)
        for file in (keys, ends, digests):
            file.flush()
            os.fsync(file.fileno())
    part = folder / "manifest.part"
    part.write_bytes(msgspec.json.encode(manifest))
    part.rename(folder / "manifest.json")


def _write_rows(
    rows: Iterable[tuple[Any, int]], of: str, *, keys: BinaryIO, ends: BinaryIO, digests: BinaryIO
) -> _Manifest:
    num_rows, end, last, are_text = 0, 0, None, False
    for key, digest in rows:
        kind = type(key)
        if kind not in (int, str) or (num_rows and (kind is str) != are_text):
            got = f"a key that is {'NULL' if key is None else f'a {kind.__name__}'}"
            raise DataError(Problem(got, "whole numbers, or text, in every row", "CAST(key AS TEXT)"), where="ff.sql")
        if num_rows and key == last:  # rows come in the order of the key
            raise DataError(Problem(f"several rows with the key {key!r}", "a key that is unique"), where="ff.sql")
        are_text, last, num_rows = kind is str, key, num_rows + 1
        content = key.encode() if are_text else struct.pack("<q", key)
        keys.write(content)
        if are_text:
            end += len(content)
            ends.write(struct.pack("<Q", end))
        digests.write(struct.pack("<Q", digest))
    if not num_rows:
        raise DataError(Problem("a query without rows", "at least one"), where="ff.sql")
    return _Manifest(VERSION, of, num_rows, are_text)


def _read_manifest(path: Path) -> _Manifest:
    try:
        with path.open("rb") as file:
            manifest = from_json(file.read(MAX_MANIFEST_BYTES), _Manifest)
    except (DecodeError, OSError) as error:
        raise DataError(Problem(f"{path}: {error}", "the index as it was written", "remove its folder")) from None
    if manifest.version != VERSION or manifest.num_rows < 1:
        raise _damaged(path)
    return manifest


def _mapped(path: Path, dtype: Any, length: int) -> np.ndarray:
    size = length * np.dtype(dtype).itemsize
    try:
        if path.stat().st_size != size:
            raise _damaged(path)
        return np.memmap(path, dtype, "r", shape=(length,)) if length else np.empty(0, dtype)
    except OSError as error:
        raise DataError(Problem(f"{path}: {error.strerror}", "the index as it was written")) from None


def _damaged(path: Path) -> DataError:
    return DataError(Problem(f"{path}, which is damaged", "the index as it was written", "remove its folder"))


# ---- the source ------------------------------------------------------------------------------------------------------


NUM_TYPED = 64  # rows, spread evenly, that show the types and forms of the columns


class RowSource:
    """Numbered samples of a database. `fetch` reads a batch in one query."""

    def __init__(
        self, database: Database, columns: Columns, *, of: str, index: str | None = None, backoff: Backoff | None = None
    ) -> None:
        """`of`: what the index is of."""
        self._database, self._columns, self._backoff = database, columns, backoff or Backoff()
        # The mapping of an index in a temporary folder lives on when its files have no name any more.
        with temporary_folder() if index is None else contextlib.nullcontext(Path(index)) as folder:
            self._index: RowIndex = self._retry(lambda: self._open_index(folder, of))
        some = [number * len(self) // NUM_TYPED for number in range(NUM_TYPED)]
        keys = [each.key for each in self._index.rows(list(dict.fromkeys(some)))]
        self._retry(lambda: self._learn(keys))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int, /) -> Any:
        return self._sample(number, self._read([number])[0])

    def fetch(self, numbers: Sequence[int], /) -> Any:
        """The batch of these samples."""
        wanted = list(numbers) or [0]
        rows = self._read(wanted)
        batch = self._columns.batch(rows)
        if batch is None:
            samples = [self._sample(*each, in_batch=True) for each in zip(wanted, rows, strict=True)]
            batch = make_batch(samples, wanted, key=self.sample_key)
        return batch if len(numbers) else empty_like(batch)

    def _sample(self, number: int, row: Row, *, in_batch: bool = False) -> Any:
        try:
            return self._columns.sample(row, in_batch=in_batch)
        except (ValueError, OverflowError) as error:
            raise DamagedSample(self.sample_key(number), str(error), where=self._database.url) from error

    def sample_key(self, number: int) -> str:
        """The key of a sample's row."""
        return self._named(self._index.rows([number])[0].key)

    def _named(self, key: Any) -> str:
        return f"{self._columns.key} = {key!r}"

    # Closed: after an error their cursors would else be, by the garbage collector, behind their connection.

    def _open_index(self, folder: Path, of: str) -> RowIndex:
        with contextlib.closing(self._database.scan()) as rows:
            return open_index(folder, of, ((row[self._columns.key_place], row_digest(row)) for row in rows))

    def _learn(self, keys: Sequence[Any]) -> None:
        with contextlib.closing(self._database.rows(keys)) as rows:
            self._columns.learn(rows)

    def _read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these samples. Raises DamagedSample for one that is not as it was."""
        indexed, place = self._index.rows(numbers), self._columns.key_place
        by_key = {row[place]: row for row in self._retry(lambda: self._batch([each.key for each in indexed]))}
        found = []
        for key, digest in indexed:
            row = by_key.get(key)
            if row is None or row_digest(row) != digest:
                reason = f"its row {'is gone' if row is None else 'has changed'} since the keys were read"
                raise DamagedSample(self._named(key), reason, where=self._database.url)
            found.append(row)
        return found

    def _batch(self, keys: Sequence[Any]) -> list[Row]:
        """The rows with these keys. Raises DataError once they are more than memory has room for."""
        rows, num_bytes = list[Row](), 0
        with contextlib.closing(self._database.rows(keys)) as arriving:
            for row in arriving:
                rows.append(row)
                num_bytes += sum(len(value) for value in row if isinstance(value, bytes | str))
                check_batch_fits(num_bytes, f"a batch of {len(rows)} rows or more", self._database.url)
        return rows

    def _retry(self, read: Callable[[], Result]) -> Result:
        return retried(self._database, read, self._backoff)
