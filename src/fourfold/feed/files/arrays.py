"""Arrays of numpy: .npy, and .npz, which is a zip file of them: of many samples, or of one sample each. Never a pickle.

head  what a .npy file says of its array
row   a sample of a single file: the arrays at one index of their first dim
Law: what a head claims of an array's size must be what its bytes are, and fit into memory, before it is read; an array
of Python objects is refused.
"""

import io
import math
import os
import threading
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from fourfold.feed.files.listing import Listing
from fourfold.feed.pack.schema import PAIR
from fourfold.feed.unpacked import check_fits
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DamagedSample, DataError, Problem

# ---- a file ----------------------------------------------------------------------------------------------------------


LONE = "x"  # the name of an array that has none
NUMBERS, NOT_OBJECTS = "biufc", "biufcSUVmM"  # kinds of dtypes
UNREADABLE = (ValueError, OSError, EOFError, MemoryError)
MAX_RATIO = 1100  # of deflate: what an entry of a zip file can expand to
CHUNK_BYTES = 2**20
# Python 3.11's parser of literals fails now and then where two threads are in it (python/cpython#106905).
_PARSING = threading.Lock()


class NpyHead(NamedTuple):
    """What a .npy file says of its array. `start`: the array's first byte."""

    dtype: np.dtype
    shape: tuple[int, ...]
    by_columns: bool
    start: int


def parse_npy_head(file: Any) -> NpyHead:
    """What the head of a .npy file says, of an array of any dtype and size. Raises ValueError if it is damaged."""
    version = npy_format.read_magic(file)
    readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array of version {version[0]}.{version[1]}")
    try:
        with _PARSING:
            shape, by_columns, dtype = readers[version](file)
    except Exception as error:  # numpy's parser raises what its input leads to: SyntaxError, IndexError, …
        raise ValueError(f"a head that cannot be read: {str(error) or type(error).__name__}") from error
    return NpyHead(dtype, shape, by_columns, file.tell())


def read_npy_head(file: Any, size: int, kinds: str = NUMBERS) -> NpyHead:
    """The head of a .npy file of `size` bytes. Raises ValueError if it is damaged, or of a dtype of other kinds."""
    head = parse_npy_head(file)
    dtype, shape = head.dtype, head.shape
    if dtype.kind not in kinds or dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"an array of {'Python objects in dtype ' if dtype.hasobject else ''}{dtype}, not of numbers")
    is_possible = all(type(extent) is int and 0 <= extent < 2**63 for extent in shape)
    if not is_possible or dtype.itemsize * math.prod(shape) != size - head.start:
        raise ValueError(f"{size - head.start} bytes for an array of {dtype} {list(shape)}")
    return head


def read_npy(file: Any, size: int, kinds: str = NUMBERS) -> np.ndarray:
    """The array of an open .npy file of `size` bytes. Raises ValueError if it is damaged, or of other kinds."""
    head = read_npy_head(file, size, kinds)
    check_fits(size, f"an array of {head.dtype} {list(head.shape)}")
    content = np.empty(size - head.start, dtype=np.uint8)
    for start in range(0, len(content), CHUNK_BYTES):
        part = content[start : start + CHUNK_BYTES]
        if file.readinto(part) != len(part):
            raise ValueError(f"the array ends before its {len(content)} bytes")
    array = content.view(head.dtype).reshape(head.shape, order="F" if head.by_columns else "C")
    return np.asarray(array, dtype=head.dtype.newbyteorder("="), order="C")


def parse_npy(content: bytes) -> np.ndarray:
    """The array of numbers in the bytes of a .npy file. Raises ValueError if it is damaged, or of something else."""
    return read_npy(io.BytesIO(content), len(content))


def _read_npy_file(path: str, kinds: str = NUMBERS) -> np.ndarray:
    """The array of a .npy file."""
    with open(path, "rb") as file:
        return read_npy(file, os.fstat(file.fileno()).st_size, kinds)


def _map_npy(path: str, kinds: str = NUMBERS) -> np.ndarray:
    """The array of a .npy file, mapped: it is read as it is used."""
    with open(path, "rb") as file:
        head = read_npy_head(file, os.fstat(file.fileno()).st_size, kinds)
    return np.memmap(path, head.dtype, "r", head.start, head.shape, "F" if head.by_columns else "C")


def is_npz(path: str) -> bool:
    """Whether a file is a zip file of arrays, by its name."""
    return path.lower().endswith(".npz")


def read_npz_heads(path: str, kinds: str = NUMBERS) -> dict[str, NpyHead]:
    """The heads of the arrays of a .npz file. Raises ValueError if it is damaged, or larger than memory."""
    return _read_npz(path, read_npy_head, kinds)


def read_npz(path: str | BinaryIO, kinds: str = NUMBERS) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, or of an open one. Raises ValueError if it is damaged, or larger than memory."""
    return _read_npz(path, read_npy, kinds)


def _read_npz(path: str | BinaryIO, read: Any, kinds: str) -> dict[str, Any]:
    arrays, size = {}, os.path.getsize(path) if isinstance(path, str) else path.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            check_fits(sum(entry.file_size for entry in entries), "arrays")
            for entry in entries:
                if not entry.filename.endswith(".npy"):
                    raise ValueError(f"{entry.filename} is no array")
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{entry.filename}: a compression that numpy does not write")
                if entry.file_size > MAX_RATIO * size:
                    raise ValueError(f"{entry.filename} of {entry.file_size} bytes in a file of {size}")
                name = entry.filename.removesuffix(".npy")
                if name in arrays:
                    raise ValueError(f"{entry.filename} twice")
                with archive.open(entry) as file:
                    arrays[name] = read(file, entry.file_size, kinds)
    except Exception as error:  # and so does Python's reader of zip files
        raise ValueError(str(error) or type(error).__name__) from error
    return arrays


# ---- a source --------------------------------------------------------------------------------------------------------


class ArrayRows:
    """The rows of one npy or npz file. A row is a dict of arrays, or a pair if they are named inputs and targets."""

    def __init__(self, listing: Listing) -> None:
        self.name = self._path = listing.path(0)
        try:
            if is_npz(self._path):
                self._arrays = read_npz(self._path, NOT_OBJECTS)
            else:
                self._arrays = {LONE: _map_npy(self._path, NOT_OBJECTS)}
        except UNREADABLE as error:
            problem = Problem(f"{self._path}: {_reason(error)}", "a whole file of arrays, without pickled objects")
            raise DataError(problem, where=self._path) from error
        lengths = {name: len(array) if array.ndim else None for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            got = comma_list(f"{name} {list(array.shape)}" for name, array in self._arrays.items()) or "no arrays"
            attempt = "a folder of files, if a file is one sample"
            raise DataError(Problem(got, "arrays with one row per sample each", attempt), where=self._path)
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length or 0

    def __getitem__(self, index: int, /) -> Any:
        row = {name: array[index] for name, array in self._arrays.items()}
        check_fits(sum(part.nbytes for part in row.values()), "a row")  # of a mapped file, perhaps with holes
        return _as_sample({name: np.array(part) for name, part in row.items()})

    def sample_key(self, index: int) -> str:
        return f"{self._path}, row {index}"


class ArrayFiles:
    """A file per sample."""

    def __init__(self, listing: Listing) -> None:
        self._listing, self.name = listing, listing.root

    def __len__(self) -> int:
        return len(self._listing.names)

    def __getitem__(self, index: int, /) -> Any:
        path = self._listing.path(index)
        try:
            return _as_sample(
                read_npz(path, NOT_OBJECTS) if is_npz(path) else {LONE: _read_npy_file(path, NOT_OBJECTS)}
            )
        except UNREADABLE as error:
            raise DamagedSample(path, _reason(error)) from error

    def sample_key(self, index: int) -> str:
        return self._listing.path(index)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _as_sample(arrays: Mapping[str, np.ndarray]) -> Any:
    native = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}
    return tuple(native[name] for name in PAIR) if set(native) == set(PAIR) else native
