"""Arrays of numpy: .npy, and .npz, which is a zip file of them. Never a pickle.

head  what a .npy file says of its array
row   the arrays of a file at one index of their first dim: a sample, unless a file is one (`file_samples.py`)
Law: what a head claims of an array's size must be what its bytes are, and fit into memory, before it is read; an array
of Python objects is refused.
"""

import io
import math
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from fourfold.feed.formats.positioned import PositionedFiles, file_size
from fourfold.feed.unpacked import Unpacked, check_fits
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem, first_line

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
    is_copied = head.by_columns or not head.dtype.isnative
    check_fits(size, f"an array of {head.dtype} {list(head.shape)}", times=1 + is_copied)
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


def is_npz(path: str) -> bool:
    """Whether a file is a zip file of arrays, by its name."""
    return path.lower().endswith(".npz")


def read_array_file(path: str) -> dict[str, np.ndarray]:
    """The arrays of a .npy or .npz file. Raises ValueError if it is damaged, or larger than memory."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        arrays = read_npz(file, NOT_OBJECTS) if is_npz(path) else {LONE: read_npy(file, size, NOT_OBJECTS)}
    return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}


def read_npz(file: BinaryIO, kinds: str = NUMBERS) -> dict[str, np.ndarray]:
    """The arrays of an open .npz file. Raises ValueError if it is damaged, or larger than memory."""
    return _read_npz(file, read_npy, kinds)


def _read_npz(file: BinaryIO, read: Callable[[Any, int, str], Any], kinds: str) -> dict[str, Any]:
    arrays, size = {}, file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
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
                with archive.open(entry) as member:
                    arrays[name] = read(member, entry.file_size, kinds)
    except Exception as error:  # and so does Python's reader of zip files
        raise ValueError(str(error) or type(error).__name__) from error
    return arrays


# ---- rows ------------------------------------------------------------------------------------------------------------


class ArrayRows:
    """The rows of npy or npz files, which have the same arrays: of one file, or of several `shards`.

    Shards have arrays of numbers alone, which are stored by rows.
    """

    noun = "row"

    def __init__(self, name: str, paths: Sequence[str], *, shards: bool) -> None:
        self.name, self.paths, self._are_shards = name, paths, shards
        self.files = None if is_npz(paths[0]) else PositionedFiles(paths)
        self._heads = [self._open(path) for path in paths]
        first = self._heads[0]
        self.field_names = list(first)
        for path, heads in zip(paths, self._heads, strict=True):
            if _form(heads) != _form(first):
                problem = Problem(f"{path}: {_form(heads)}", f"{_form(first)}, as in {paths[0]}", "a folder for each")
                raise DataError(problem, where=name)
        self.shard_sizes = [next(iter(heads.values())).shape[0] for heads in self._heads]
        self._unpacked = Unpacked[dict[str, np.ndarray]]()

    def read(self, file: int, records: Sequence[int]) -> Iterable[dict[str, Any]]:
        path, heads = self.paths[file], self._heads[file]
        if is_npz(path):
            num_bytes = sum(head.dtype.itemsize * math.prod(head.shape) for head in heads.values())
            held = self._unpacked.get(file, num_bytes, lambda: _unpack(path, heads))
            return ({name: array[record].copy() for name, array in held.items()} for record in records)
        return ({LONE: self._row(file, record, heads[LONE])} for record in records)

    def _row(self, file: int, record: int, head: NpyHead) -> np.ndarray:
        """A row of a .npy file."""
        shape = head.shape[1:]
        row_bytes = head.dtype.itemsize * math.prod(shape)
        if head.by_columns:
            check_fits(row_bytes, "a row")
            row = np.memmap(self.paths[file], head.dtype, "r", head.start, head.shape, "F")[record]
        else:
            assert self.files is not None
            content = self.files.read(file, head.start + record * row_bytes, row_bytes)
            row = np.frombuffer(content, head.dtype).reshape(shape)
        return np.array(row, dtype=head.dtype.newbyteorder("="))

    def _open(self, path: str) -> dict[str, NpyHead]:
        kinds = NUMBERS if self._are_shards else NOT_OBJECTS
        try:
            size = file_size(path)
            with open(path, "rb") as file:
                if is_npz(path):
                    heads = _read_npz(file, read_npy_head, kinds)
                else:
                    heads = {LONE: read_npy_head(file, size, kinds)}
                    if self._are_shards and heads[LONE].by_columns and len(heads[LONE].shape) > 1:
                        raise ValueError("an array that is stored by columns, not by rows")
        except UNREADABLE as error:
            need = "of numbers, row by row" if self._are_shards else "without pickled objects"
            problem = Problem(f"{path}: {first_line(error)}", f"a whole file of arrays {need}")
            raise DataError(problem, where=path) from error
        lengths = {head.shape[0] if head.shape else None for head in heads.values()}
        if len(lengths) != 1 or None in lengths:
            got = comma_list(f"{name} {list(head.shape)}" for name, head in heads.items()) or "no arrays"
            attempt = "" if self._are_shards else "a folder of files, if a file is one sample"
            raise DataError(Problem(f"{path}: {got}", "arrays with one row for each sample", attempt), where=path)
        return heads


def _unpack(path: str, heads: dict[str, NpyHead]) -> dict[str, np.ndarray]:
    """The arrays of a .npz file. Raises ValueError if it is damaged, or not as it was when it was opened."""
    arrays = read_array_file(path)
    found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    if found != {name: (head.dtype.newbyteorder("="), head.shape) for name, head in heads.items()}:
        raise ValueError(f"arrays {found}, not those of when it was opened")
    return arrays


def _form(heads: dict[str, NpyHead]) -> str:
    return comma_list(f"{name} {each.dtype} {list(each.shape[1:])}" for name, each in heads.items())
