"""MosaicML's MDS: samples in shards, by an index in JSON.

index.json  of each shard its columns, its number of samples, and the names and sizes of its files
shard       number of samples n, uint32 [n + 1] offsets, a JSON head, and the samples; perhaps compressed as a whole
sample      uint32 sizes of the columns without a fixed one, then the values
encoding    what a column holds, such as `int`, `ndarray:float32:3,4` or `jpeg`; of a fixed size, or one in each sample
Law: names stay below the folder; counts and offsets are checked against the sizes of files before they are used. What
an encoding claims, a shape or a size, must account for every byte of the value. `pkl` is refused. A compressed shard
is unpacked into memory when something of it is read: no more than the index says that the file has, and the compressed
file bounds what it may say; one of another size, or without its end, is damaged.

Source: mosaicml-streaming 0.13.0, base/format/mds/{writer,reader,encodings}.py.
"""

import bz2
import gzip
import itertools
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fourfold.feed.formats.positioned import PositionedFiles, read_json
from fourfold.feed.formats.source import parse_json, stackable
from fourfold.feed.optional_package import import_optional
from fourfold.feed.pack.schema import EncodedImage
from fourfold.feed.unpacked import Unpacked
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem

# ---- compressed files ------------------------------------------------------------------------------------------------


CHUNK_BYTES, WINDOW_BYTES = 2**22, 2**27  # what zstd holds besides, at most
LEAST_BYTES, MAX_RATIO = 2**26, 2000  # MDS writes 64 MiB by default; more from less is one value over and over


def _check_compression(text: Any) -> str:
    """The algorithm of `zstd:7`. Raises ValueError for one that cannot be read, DataError if its library is missing."""
    name = text.partition(":")[0] if isinstance(text, str) else repr(text)
    if name not in READERS:
        raise ValueError(f"compression {name[:60]}, not {', '.join(READERS)}")
    if name == "zstd":
        _zstandard()
    return name


def _zstandard() -> Any:
    got, need = "files compressed by zstd, and no zstandard", "zstandard, which reads them"
    return import_optional("zstandard", need, "zstd", got=got)


READERS: dict[str, Callable[[BinaryIO], Any]] = {
    "zstd": lambda file: _zstandard().ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bz2": bz2.BZ2File,
}


def _unpack(files: PositionedFiles, file: int, compression: str, num_bytes: int) -> memoryview:
    """What was compressed, which has `num_bytes`. Raises ValueError if it is damaged, or longer or shorter."""
    if num_bytes > max(LEAST_BYTES, MAX_RATIO * (size := files.sizes[file])):
        raise ValueError(f"{num_bytes} bytes by {compression} from {size}")
    content, done = memoryview(bytearray(num_bytes)), 0
    try:
        # They read files of several members, and the checksums at their ends.
        with open(files.paths[file], "rb") as packed:
            reader = READERS[compression](packed)
            while count := reader.readinto(content[done : done + CHUNK_BYTES]):
                done += count
            is_longer = bool(reader.read(1))
    except Exception as error:
        if isinstance(error, DataError | MemoryError):
            raise
        raise ValueError(f"{compression}: {error}") from error
    if done != num_bytes or is_longer:
        raise ValueError(f"{'more' if is_longer else done} bytes by {compression}, not {num_bytes}")
    files.add_bytes_read(size)
    return content


# ---- values ----------------------------------------------------------------------------------------------------------


FLOATS = ("float16", "float32", "float64")
SCALARS = (*(f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)), *FLOATS)
CODES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4"}
VALUE_DTYPES = CODES | {64: "<u8", 65: "<i8", 66: "<f8"}
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}  # of Pillow's modes
MAX_DIMS = 64


class _Encoding(NamedTuple):
    """How a column's values are read. `size`: of each in bytes; None: it differs."""

    decode: Callable[[bytes], Any]
    size: int | None = None


def parse_encoding(text: str) -> _Encoding:
    """The encoding of this name. Raises ValueError if it is unknown, or cannot be read here."""
    name, _, config = text.partition(":")
    if name == "ndarray":
        return _ndarray(config)
    if name == "pkl":
        raise ValueError("a pickle, which is never read")
    if not config and name in SCALARS:
        dtype = np.dtype(name).newbyteorder("<")
        return _Encoding(lambda content: _array(content, dtype, ()), dtype.itemsize)
    if config or name not in DECODERS:
        raise ValueError(f"encoding {text[:60]!r}, not one of {', '.join([*DECODERS, 'ndarray'])} or a number")
    return DECODERS[name]


def _array(content: bytes | memoryview, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {dtype.name} {list(shape)}")
    return np.frombuffer(content, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _ndarray(config: str) -> _Encoding:
    dtype_text, _, shape_text = config.partition(":")
    if dtype_text and dtype_text not in SCALARS:
        raise ValueError(f"ndarray of {dtype_text[:60]!r}")
    dtype = np.dtype(dtype_text).newbyteorder("<") if dtype_text else None
    shape = tuple(map(int, shape_text.split(","))) if shape_text else None
    if shape is not None and (min(shape) < 1 or len(shape) > MAX_DIMS or math.prod(shape) > 2**40):
        raise ValueError(f"ndarray of shape {shape_text[:60]}")

    def decode(content: bytes) -> np.ndarray:
        at, own_dtype, own_shape = 0, dtype, shape
        if own_dtype is None:
            if content[:1] and content[0] in VALUE_DTYPES:
                own_dtype, at = np.dtype(VALUE_DTYPES[content[0]]), 1
            else:
                raise ValueError(f"an array of dtype {content[:1].hex() or 'none'}")
        if own_shape is None:
            if len(content) <= at:
                raise ValueError("an array without a shape")
            num_dims, item = content[at] >> 2, 1 << (content[at] & 3)
            dims = content[at + 1 : at + 1 + num_dims * item]
            if len(dims) < num_dims * item:
                raise ValueError(f"an array whose shape is cut off, of {num_dims} dims")
            own_shape = tuple(int(size) for size in np.frombuffer(dims, dtype=f"<u{item}"))
            at += 1 + len(dims)
        return _array(memoryview(content)[at:], own_dtype, own_shape)

    fixed = dtype is not None and shape is not None
    return _Encoding(decode, math.prod(shape) * dtype.itemsize if fixed else None)  # type: ignore[arg-type,union-attr]


def _whole_number(content: bytes) -> int:
    if len(content) > 20:  # more digits than int64 has: Python's ints have no bound
        raise ValueError(f"a whole number of {len(content)} digits")
    return stackable(int(content.decode()))


def _pil(content: bytes) -> np.ndarray:
    """Pixels: uint8 [3, height, width], as Pillow converts them to RGB."""
    if len(content) < 12:
        raise ValueError(f"an image of {len(content)} bytes")
    width, height, mode_bytes = struct.unpack_from("<III", content)
    mode = content[12 : 12 + min(mode_bytes, 16)].decode()
    if len(mode) != mode_bytes or mode not in CHANNELS:
        raise ValueError(f"an image of mode {mode!r}, not {', '.join(CHANNELS)}")
    pixels = _array(memoryview(content)[12 + mode_bytes :], np.dtype("u1"), (height, width, CHANNELS[mode]))
    rgb = pixels[..., :3] if mode != "L" else np.repeat(pixels, 3, axis=2)
    return np.ascontiguousarray(rgb.transpose(2, 0, 1))


DECODERS = {
    "bytes": _Encoding(bytes),
    "str": _Encoding(lambda content: content.decode()),
    "int": _Encoding(lambda content: _array(content, np.dtype("<i8"), ()), 8),
    "str_int": _Encoding(_whole_number),
    "str_float": _Encoding(lambda content: float(content.decode())),
    "str_decimal": _Encoding(lambda content: content.decode()),
    "json": _Encoding(parse_json),
    "jpeg": _Encoding(EncodedImage),
    "png": _Encoding(EncodedImage),
    "pil": _Encoding(_pil),
}


# ---- samples ---------------------------------------------------------------------------------------------------------


INDEX_FILE = "index.json"
MAX_INDEX_BYTES, MAX_COLUMNS = 2**28, 1000
NEED = "an index.json of MDS, version 2"


class Shard(NamedTuple):
    """A shard. `path`: of its compressed file, if the other is missing; `compression`: of that file."""

    path: str
    num_bytes: int
    num_samples: int
    compression: str | None


class Columns(NamedTuple):
    """The columns of samples: their names and encodings; `decoded`: which of them are wanted."""

    names: tuple[str, ...]
    encodings: tuple[_Encoding, ...]
    decoded: tuple[bool, ...]


class MDS:
    """The samples of a folder of MDS shards."""

    noun = "sample"

    def __init__(self, folder: str | Path, columns: Sequence[str] | None = None) -> None:
        self.name = str(folder)
        content = _read_index(Path(folder) / INDEX_FILE)
        self._columns = _columns_of(content, columns, self.name)
        self.field_names = self._columns.names
        self._shards = [_shard_of(Path(folder), number, each) for number, each in enumerate(content)]
        self.shard_sizes = [shard.num_samples for shard in self._shards]
        self.paths = [shard.path for shard in self._shards]
        self.files, self._unpacked = PositionedFiles(self.paths), Unpacked[memoryview]()
        for number, shard in enumerate(self._shards):
            if shard.compression is None:
                self._check(number, shard)

    def _check(self, number: int, shard: Shard) -> None:
        size, need = self.files.sizes[number], f"{shard.num_samples} samples in {shard.num_bytes} bytes"
        count = int.from_bytes(self.files.read(number, 0, min(4, size)), "little")
        if size != shard.num_bytes or count != shard.num_samples:
            problem = Problem(f"{shard.path}: {count} samples in {size} bytes", f"{need}, as {INDEX_FILE} says")
            raise DataError(problem, where=self.name)

    def __reduce__(self) -> Any:  # decoders cannot be sent
        names, _, decoded = self._columns
        return MDS, (self.name, list(itertools.compress(names, decoded)))

    def read(self, file: int, records: Sequence[int]) -> Iterable[dict[str, Any]]:
        return (self._parse(self._content(file, record)) for record in records)

    def _content(self, file: int, record: int) -> bytes:
        shard = self._shards[file]
        start, stop = np.frombuffer(self._bytes(file, 4 + 4 * record, 8), dtype="<u4").tolist()
        if not 4 * (2 + shard.num_samples) <= start <= stop <= shard.num_bytes:
            raise ValueError(f"a sample of bytes {start} to {stop}")
        return self._bytes(file, start, stop - start)

    def _bytes(self, file: int, offset: int, length: int) -> bytes:
        shard = self._shards[file]
        if (compression := shard.compression) is None:
            return self.files.read(file, offset, length)
        needed = shard.num_bytes + min(shard.num_bytes, WINDOW_BYTES)
        content = self._unpacked.get(file, needed, lambda: _unpack(self.files, file, compression, shard.num_bytes))
        if offset + length > len(content):
            raise ValueError(f"bytes {offset} to {offset + length} of {len(content)}")
        return bytes(content[offset : offset + length])

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

    def shards_of(content: Any) -> Any:
        shards = content["shards"]
        if content["version"] != 2 or not isinstance(shards, list):
            raise ValueError(f"version {content['version']!r}, and shards of type {type(shards).__name__}")
        return shards

    shards = read_json(path, shards_of, MAX_INDEX_BYTES, NEED)
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
            encoding = _Encoding(bytes, size if isinstance(size, int) else None)
            if name not in unwanted:
                encoding = parse_encoding(text)
            if encoding.size != (size or None) or (encoding.size or 0) < 0:
                raise ValueError(f"of {size!r} bytes, where {text[:60]} has {encoding.size or 'no fixed size'}")
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
        if compression is not None and not os.path.exists(path):
            path, compression = _file_of(folder, found["zip_data"])[0], _check_compression(compression)
        else:
            compression = None
    except (ValueError, KeyError, TypeError) as error:
        got = f"shard {number}: {type(error).__name__}: {str(error)[:200]}"
        raise DataError(Problem(got, NEED), where=str(folder / INDEX_FILE)) from error
    return Shard(str(path), num_bytes, num_samples, compression)


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
