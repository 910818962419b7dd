"""Arrays, many samples per file: a folder of npy or npz files whose first dim counts samples.

row  the arrays of a file at one index of their first dim: a sample
Law: a header's shape is checked against the bytes that follow it before anything is read; no object is unpickled.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fourfold.feed.files.arrays import LONE, UNREADABLE, NpyHead, is_npz, read_npy_head, read_npz, read_npz_heads
from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.unpacked import Unpacked
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem


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
        self._unpacked = Unpacked[dict[str, np.ndarray]]()

    @property
    def bytes_read(self) -> int | None:
        return None if is_npz(self._files.paths[0]) else self._files.bytes_read

    def key(self, file: int, record: int) -> str:
        return f"{self._files.paths[file]}, row {record}"

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        if is_npz(self._files.paths[file]):
            held = self._npz(file)
            return [{name: array[record].copy() for name, array in held.items()} for record in records]
        (array,) = self._arrays[file].values()
        rows, row_bytes = [], array.dtype.itemsize * math.prod(array.shape[1:])
        for record in records:
            content = self._files.read(file, array.start + record * row_bytes, row_bytes)
            row = np.frombuffer(content, array.dtype).reshape(array.shape[1:])
            rows.append({LONE: row.astype(array.dtype.newbyteorder("="))})
        return rows

    def _npz(self, file: int) -> dict[str, np.ndarray]:
        heads = self._arrays[file]
        num_bytes = sum(head.dtype.itemsize * math.prod(head.shape) for head in heads.values())
        return self._unpacked.get(file, num_bytes, lambda: _read_npz(self._files.paths[file], heads))

    def _open(self, file: int) -> dict[str, NpyHead]:
        path, size = self._files.paths[file], self._files.sizes[file]
        try:
            if is_npz(path):
                arrays = read_npz_heads(path)
            else:
                with open(path, "rb") as opened:
                    arrays = {LONE: read_npy_head(opened, size)}
                if arrays[LONE].by_columns and len(arrays[LONE].shape) > 1:
                    raise ValueError("an array that is stored by columns, not by rows")
        except UNREADABLE as error:
            got = f"{path}: {(str(error).splitlines() or [type(error).__name__])[0]}"
            raise DataError(Problem(got, "whole files of arrays of numbers, row by row"), where=path) from error
        lengths = {array.shape[0] if array.shape else None for array in arrays.values()}
        if len(lengths) != 1 or None in lengths:
            got = comma_list(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "no arrays"
            raise DataError(Problem(f"{path}: {got}", "arrays with one row for each sample"), where=path)
        return arrays


def _read_npz(path: str, heads: dict[str, NpyHead]) -> dict[str, np.ndarray]:
    """The arrays of a file. Raises ValueError if it is damaged, or not as it was when it was opened."""
    arrays = read_npz(path)
    found = {name: array.shape for name, array in arrays.items()}
    if found != {name: head.shape for name, head in heads.items()}:
        raise ValueError(f"arrays {found}, not those of when it was opened")
    return arrays


def _form(arrays: dict[str, NpyHead]) -> str:
    return comma_list(f"{name} {each.dtype} {list(each.shape[1:])}" for name, each in arrays.items())
