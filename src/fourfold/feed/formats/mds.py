"""MosaicML's MDS: samples in shards, by an index in JSON.

index.json  of each shard its columns, its number of samples, and the names and sizes of its files
shard       number of samples n, uint32 [n + 1] offsets, a JSON head, and the samples; perhaps compressed as a whole
sample      uint32 sizes of the columns without a fixed one, then the values
Law: names stay below the folder; counts and offsets are checked against the sizes of files before they are used.

Source: mosaicml-streaming 0.13.0, base/format/mds/writer.py and reader.py.
"""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from fourfold.feed.formats.compressed import UnpackedFiles, check_compression
from fourfold.feed.formats.mds_values import Encoding, parse_encoding
from fourfold.feed.formats.positioned import PositionedFiles, file_size
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem

INDEX_FILE = "index.json"
MAX_INDEX_BYTES, MAX_COLUMNS = 2**28, 1000
NEED = "an index.json of MDS, version 2"


class Shard(NamedTuple):
    """A shard. `packed`: its compressed file and the compression, if the file that is not compressed is missing."""

    path: str
    num_bytes: int
    num_samples: int
    packed: tuple[str, str] | None


class Columns(NamedTuple):
    """The columns of samples: their names and encodings; `decoded`: which of them are wanted."""

    names: tuple[str, ...]
    encodings: tuple[Encoding, ...]
    decoded: tuple[bool, ...]


class MDS:
    """The samples of a folder of MDS shards."""

    def __init__(self, folder: str | Path, columns: Sequence[str] | None = None) -> None:
        self.name = str(folder)
        content = _read_index(Path(folder) / INDEX_FILE)
        self._columns = _columns_of(content, columns, self.name)
        self.field_names = self._columns.names
        self._shards = [_shard_of(Path(folder), number, each) for number, each in enumerate(content)]
        self.shard_sizes = [shard.num_samples for shard in self._shards]
        plain = [shard.packed[0] if shard.packed else shard.path for shard in self._shards]
        self._files = PositionedFiles(plain)
        self._unpacked = UnpackedFiles(self._files)
        for number, shard in enumerate(self._shards):
            if shard.packed is None:
                self._check(number, shard)

    def _check(self, number: int, shard: Shard) -> None:
        size, need = self._files.sizes[number], f"{shard.num_samples} samples in {shard.num_bytes} bytes"
        count = int.from_bytes(self._files.read(number, 0, min(4, size)), "little")
        if size != shard.num_bytes or count != shard.num_samples:
            problem = Problem(f"{shard.path}: {count} samples in {size} bytes", f"{need}, as {INDEX_FILE} says")
            raise DataError(problem, where=self.name)

    def __getstate__(self) -> dict[str, Any]:  # decoders cannot be sent
        names, _, decoded = self._columns
        return {"folder": self.name, "columns": list(itertools.compress(names, decoded))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def key(self, file: int, record: int) -> str:
        return f"{self._files.paths[file]}, sample {record}"

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        return [self._parse(self._content(file, record)) for record in records]

    def _content(self, file: int, record: int) -> bytes:
        shard = self._shards[file]
        start, stop = np.frombuffer(self._bytes(file, 4 + 4 * record, 8), dtype="<u4").tolist()
        if not 4 * (2 + shard.num_samples) <= start <= stop <= shard.num_bytes:
            raise ValueError(f"a sample of bytes {start} to {stop}")
        return self._bytes(file, start, stop - start)

    def _bytes(self, file: int, offset: int, length: int) -> bytes:
        shard = self._shards[file]
        if shard.packed is None:
            return self._files.read(file, offset, length)
        return self._unpacked.read(file, shard.packed[1], shard.num_bytes, offset, length)

    def _parse(self, content: bytes) -> dict[str, Any]:
        columns, sizes, at = self._columns, list[int](), 0
        for encoding in columns.encodings:
            if encoding.size is None:
                sizes.append(int.from_bytes(content[at : at + 4], "little"))
                at += 4
            else:
                sizes.append(encoding.size)
        if at + sum(sizes) != len(content):
            raise ValueError(f"columns of {at + sum(sizes)} bytes in a sample of {len(content)}")
        sample = {}
        for name, encoding, decoded, size in zip(*columns, sizes, strict=True):
            if decoded:
                try:
                    sample[name] = encoding.decode(content[at : at + size])
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{name}: {error}") from error
            at += size
        return sample


def _read_index(path: Path) -> list[dict[str, Any]]:
    """The shards of an index. Raises DataError if it is none."""
    size = file_size(str(path))
    if size > MAX_INDEX_BYTES:
        raise DataError(Problem(f"{path} of {size} bytes", f"at most {MAX_INDEX_BYTES}"), where=str(path))
    try:
        content = json.loads(path.read_bytes())
        shards = content["shards"]
        if (
            content["version"] != 2
            or not isinstance(shards, list)
            or not all(isinstance(each, dict) for each in shards)
        ):
            raise ValueError(f"version {content['version']!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{path}: {type(error).__name__}: {str(error)[:200]}"
        raise DataError(Problem(got, NEED), where=str(path)) from error
    for number, shard in enumerate(shards):
        if (form := shard.get("format")) != "mds" or shard.get("version") != 2:
            got = f"shard {number} of format {form!r}, version {shard.get('version')!r}"
            raise DataError(Problem(got, "mds, version 2"), where=str(path))
    return shards


def _columns_of(shards: Sequence[dict[str, Any]], wanted: Sequence[str] | None, where: str) -> Columns:
    """The columns that all shards have. Raises DataError, with all problems, if they cannot be read."""
    if not shards:
        raise DataError(Problem("no shards", "at least one"), where=where)
    keys = ("column_names", "column_encodings", "column_sizes")
    found: list[Any] = [shards[0].get(key) for key in keys]
    names, texts, sizes = found
    if not all(isinstance(each, list) for each in found) or not len(names) == len(texts) == len(sizes) <= MAX_COLUMNS:
        raise DataError(Problem("shard 0 whose columns cannot be read", NEED), where=where)
    if not all(isinstance(each, str) for each in [*names, *texts]) or len(set(names)) < len(names):
        raise DataError(Problem("columns whose names are not different texts", NEED), where=where)
    for number, shard in enumerate(shards):
        if [shard.get(key) for key in keys] != found:
            got = f"shard {number} with other columns than shard 0"
            raise DataError(Problem(got, "one schema", "a folder for each"), where=where)
    unwanted = {name for name in names if wanted is not None and name not in wanted}
    problems = argument_checks.unknown_name_problems("column", wanted or (), names)
    encodings = []
    for name, text, size in zip(names, texts, sizes, strict=True):
        try:
            encoding = Encoding(bytes, size if isinstance(size, int) else None)
            if name not in unwanted:
                encoding = parse_encoding(text)
            if encoding.size != (size or None) or (encoding.size or 0) < 0:
                raise ValueError(f"of {size} bytes, where {text[:60]} has {encoding.size or 'no fixed size'}")
            encodings.append(encoding)
        except ValueError as error:
            problems.append(Problem(f"column {name!r}: {error}", attempt="columns= without it"))
    if problems:
        raise DataError(problems, where=where)
    return Columns(tuple(names), tuple(encodings), tuple(name not in unwanted for name in names))


def _shard_of(folder: Path, number: int, found: dict[str, Any]) -> Shard:
    try:
        path, num_bytes = _file_of(folder, found["raw_data"])
        num_samples, compression = found["samples"], found.get("compression")
        if (
            not isinstance(num_samples, int)
            or isinstance(num_samples, bool)
            or not 0 <= num_samples <= num_bytes // 4 - 2
        ):
            raise ValueError(f"{num_samples!r} samples in {num_bytes} bytes")
        packed = None
        if compression is not None and not os.path.exists(path):
            packed = str(_file_of(folder, found["zip_data"])[0]), check_compression(compression)
    except (ValueError, KeyError, TypeError) as error:
        got = f"shard {number}: {type(error).__name__}: {str(error)[:200]}"
        raise DataError(Problem(got, NEED), where=str(folder / INDEX_FILE)) from error
    return Shard(str(path), num_bytes, num_samples, packed)


def _file_of(folder: Path, info: Any) -> tuple[Path, int]:
    """A file's path and size. Raises ValueError, KeyError or TypeError for an entry that is none."""
    name, num_bytes = info["basename"], info["bytes"]
    # A merged index names the files of folders below it.
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"a file named {name[:100]!r}, outside the folder")
    if not isinstance(num_bytes, int) or not 0 <= num_bytes < 2**32:  # offsets have 32 bits
        raise ValueError(f"{name[:100]} of {num_bytes!r} bytes")
    return folder / name, num_bytes
