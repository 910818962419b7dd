"""Arrays, many samples per file: a folder of npy or npz files whose first dim counts samples.

row  the arrays of a file at one index of their first dim: a sample
Law: a header's shape is checked against the bytes that follow it before anything is read; no object is unpickled.
"""

import math
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fourfold.feed.files.arrays import LONE
from fourfold.feed.formats.plain_values import parse_npy, read_npy_head
from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.words.errors import DataError, Problem

MAX_HELD = 4  # npz files in memory: an entry of a zip file is read as a whole
ZIP_ERRORS = (KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
UNREADABLE = (ValueError, OSError, EOFError, *ZIP_ERRORS)


class _Array(NamedTuple):
    """An array in a file. `start`: its first byte; of an npz file's 0."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])


class ArrayShards:
    """The rows of npy or npz files, which have the same arrays."""

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        self.name, self._files = name, PositionedFiles(paths)
        self._arrays = [self._open(file) for file in range(len(paths))]
        first = self._arrays[0]
        self.field_names = list(first)
        for path, arrays in zip(paths, self._arrays, strict=True):
            if _form(arrays) != _form(first):
                problem = Problem(f"{path}: {_form(arrays)}", f"{_form(first)}, as in {paths[0]}", "a folder for each")
                raise DataError(problem, where=name)
        self.shard_sizes = [next(iter(arrays.values())).shape[0] for arrays in self._arrays]
        self._start()

    def _start(self) -> None:
        self._held, self._lock = OrderedDict[int, dict[str, np.ndarray]](), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_held", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def bytes_read(self) -> int | None:
        return None if _is_npz(self._files.paths[0]) else self._files.bytes_read

    def key(self, file: int, record: int) -> str:
        return f"{self._files.paths[file]}, row {record}"

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        if _is_npz(self._files.paths[file]):
            held = self._unpacked(file)
            return [{name: array[record].copy() for name, array in held.items()} for record in records]
        (array,) = self._arrays[file].values()
        rows = []
        for record in records:
            content = self._files.read(file, array.start + record * array.row_bytes, array.row_bytes)
            row = np.frombuffer(content, array.dtype).reshape(array.shape[1:])
            rows.append({LONE: row.astype(array.dtype.newbyteorder("="))})
        return rows

    def _unpacked(self, file: int) -> dict[str, np.ndarray]:
        with self._lock:
            held = self._held.pop(file, None)
            if held is None:
                held = _read_npz(self._files.paths[file], self._arrays[file])
            self._held[file] = held
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
            return held

    def _open(self, file: int) -> dict[str, _Array]:
        path, size = self._files.paths[file], self._files.sizes[file]
        try:
            if _is_npz(path):
                arrays = _open_npz(path, size)
            else:
                with open(path, "rb") as opened:
                    arrays = {LONE: _read_head(opened, size)}
        except UNREADABLE as error:
            got = f"{path}: {(str(error).splitlines() or [type(error).__name__])[0]}"
            raise DataError(Problem(got, "arrays of numbers, without objects"), where=path) from error
        lengths = {array.shape[0] if array.shape else None for array in arrays.values()}
        if len(lengths) != 1 or None in lengths:
            got = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "no arrays"
            raise DataError(Problem(f"{path}: {got}", "arrays with one row for each sample"), where=path)
        return arrays


def _is_npz(path: str) -> bool:
    return path.lower().endswith(".npz")


def _open_npz(path: str, size: int) -> dict[str, _Array]:
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".npy"):
                raise ValueError(f"{entry.filename} is no array")
            # Deflate makes at most 1032 bytes of one.
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.file_size > 1100 * size:
                raise ValueError(f"{entry.filename} of {entry.file_size} bytes in a file of {size}")
            with archive.open(entry) as opened:
                arrays[entry.filename.removesuffix(".npy")] = _read_head(opened, entry.file_size)._replace(start=0)
    return arrays


def _read_npz(path: str, needed: dict[str, _Array]) -> dict[str, np.ndarray]:
    """The arrays of a file. Raises ValueError if it is damaged, or not as it was when it was opened."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name, need in needed.items():
                arrays[name] = array = parse_npy(archive.read(f"{name}.npy"))
                if array.shape != need.shape:
                    raise ValueError(f"{name} {list(array.shape)}, not {list(need.shape)} as when opened")
    except ZIP_ERRORS as error:
        raise ValueError(str(error)) from error
    return arrays


def _read_head(file: Any, size: int) -> _Array:
    """Where the array of a .npy file is. Raises ValueError if it cannot be read by rows."""
    head = read_npy_head(file, size)
    if head.by_columns and len(head.shape) > 1:
        raise ValueError("an array that is stored by columns, not by rows")
    return _Array(head.dtype, head.shape, head.start)


def _form(arrays: dict[str, _Array]) -> str:
    return ", ".join(f"{name} {each.dtype} {list(each.shape[1:])}" for name, each in arrays.items())
