"""Arrays of numpy: one file of many samples, or many files of one sample each. Never a pickle.

row   a sample of a single file: the arrays at one index of their first dim
Law: an array of Python objects is refused; what a header says of a file's size is checked against it before it is read.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fourfold.feed.files.listing import Listing
from fourfold.feed.files.numpy_files import LONE, NOT_OBJECTS, UNREADABLE, is_npz, map_npy, read_npy_file, read_npz
from fourfold.feed.pack.schema import PAIR
from fourfold.feed.unpacked import check_fits
from fourfold.words.errors import DamagedSample, DataError, Problem


class ArrayRows:
    """The rows of one npy or npz file. A row is a dict of arrays, or a pair if they are named inputs and targets."""

    def __init__(self, listing: Listing) -> None:
        self.name = self._path = listing.path(0)
        try:
            if is_npz(self._path):
                self._arrays = read_npz(self._path, NOT_OBJECTS)
            else:
                self._arrays = {LONE: map_npy(self._path, NOT_OBJECTS)}
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
            return _as_sample(read_npz(path, NOT_OBJECTS) if is_npz(path) else {LONE: read_npy_file(path, NOT_OBJECTS)})
        except UNREADABLE as error:
            raise DamagedSample(path, _reason(error)) from error

    def sample_key(self, index: int) -> str:
        return self._listing.path(index)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _as_sample(arrays: Mapping[str, np.ndarray]) -> Any:
    native = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}
    return tuple(native[name] for name in PAIR) if set(native) == set(PAIR) else native
