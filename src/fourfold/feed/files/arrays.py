"""Arrays of numpy: one file of many samples, or many files of one sample each. Never a pickle.

row   a sample of a single file: the arrays at one index of their first dim
Law: an array of Python objects is refused; what a header says of a file's size is checked against it before it is read.
"""

import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fourfold.feed.files.listing import Listing
from fourfold.feed.pack.schema import PAIR
from fourfold.words.errors import DamagedSample, DataError, Problem

LONE = "x"  # the name of an array that has none
# What is raised for damaged files: by numpy's reader of heads, and by readers of zip files.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
UNREADABLE = (ValueError, OSError, EOFError, tokenize.TokenError, *ZIP_ERRORS)
MAX_RATIO = 1100  # of deflate: what an entry of a zip file can expand to


class ArrayRows:
    """The rows of one npy or npz file. A row is a dict of arrays, or a pair if they are named inputs and targets."""

    def __init__(self, listing: Listing) -> None:
        self.name = self._path = listing.path(0)
        try:
            self._arrays = _load(self._path, mapped=True)
        except UNREADABLE as error:
            problem = Problem(f"{self._path}: {_reason(error)}", "arrays that can be read without a pickle")
            raise DataError(problem, where=self._path) from error
        lengths = {name: len(array) if array.ndim else None for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            got = ", ".join(f"{name} {list(array.shape)}" for name, array in self._arrays.items()) or "no arrays"
            attempt = "a folder of files, if a file is one sample"
            raise DataError(Problem(got, "arrays with one row per sample each", attempt), where=self._path)
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length or 0

    def __getitem__(self, index: int, /) -> Any:
        return _as_sample({name: np.array(array[index]) for name, array in self._arrays.items()})

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
            return _as_sample(_load(path, mapped=False))
        except UNREADABLE as error:
            raise DamagedSample(path, _reason(error)) from error

    def sample_key(self, index: int) -> str:
        return self._listing.path(index)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _as_sample(arrays: Mapping[str, np.ndarray]) -> Any:
    native = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}
    return tuple(native[name] for name in PAIR) if set(native) == set(PAIR) else native


def _load(path: str, *, mapped: bool) -> dict[str, np.ndarray]:
    """The arrays of a file by name. Raises ValueError or OSError if it is damaged."""
    if path.lower().endswith(".npz"):
        return _load_npz(path)
    array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    return {LONE: array}


def _load_npz(path: str) -> dict[str, np.ndarray]:
    size = os.path.getsize(path)
    with zipfile.ZipFile(path) as archive:
        claimed = sum(each.file_size for each in archive.infolist())
        if claimed > MAX_RATIO * size:
            raise ValueError(f"arrays of {claimed} bytes in a file of {size}")
    with np.load(path, allow_pickle=False) as opened:
        arrays = {}
        for name in opened.files:
            array = opened[name]
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name} is no array")
            arrays[name] = array
    return arrays
