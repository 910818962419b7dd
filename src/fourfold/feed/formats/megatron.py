"""Megatron's indexed data sets: token sequences in `NAME.bin`, and where they are in `NAME.idx`.

sequence  consecutive tokens of the .bin file; sample: {"tokens": array [length]}
head      magic, version, code of the dtype, number of sequences, number of documents; then int32 [sequences] lengths,
          int64 [sequences] pointers in bytes, int64 [documents] first sequences, and perhaps int8 [sequences] modes
Law: the index is checked against its own size and that of the .bin file before a sequence is read.

Source: megatron-core 0.16.1, core/datasets/indexed_dataset.py.
"""

import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from fourfold.feed.formats.positioned import PositionedFiles, file_size
from fourfold.feed.source import read_rows
from fourfold.words.errors import DataError, Problem

MAGIC, HEAD = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class _Index:
    """One .idx file, mapped."""

    def __init__(self, path: str) -> None:
        self.path, size = path, file_size(path)
        with open(path, "rb") as file:
            head = file.read(HEAD.size)
        if len(head) < HEAD.size or head[: len(MAGIC)] != MAGIC:
            raise self._damaged("no head of a Megatron index")
        _, version, code, sequences, documents = HEAD.unpack(head)
        if version != 1 or code not in DTYPES:
            raise self._damaged(f"version {version}, dtype {code}")
        need = HEAD.size + sequences * 12 + documents * 8
        if size not in (need, need + sequences):
            raise self._damaged(f"{size} bytes, for {sequences} sequences and {documents} documents")
        self.dtype, self.num_sequences = np.dtype(DTYPES[code]), sequences
        data = np.memmap(path, dtype=np.uint8, mode="r") if sequences else np.empty(0, dtype=np.uint8)
        content = data[HEAD.size : HEAD.size + sequences * 12].view(np.ndarray)
        self.lengths, self.pointers = content[: sequences * 4].view("<i4"), content[sequences * 4 :].view("<i8")

    def check(self, bin_bytes: int) -> None:
        """Raise DataError for the first sequence that is not in the .bin file."""
        for start in range(0, self.num_sequences, 2**20):
            lengths = self.lengths[start : start + 2**20].astype(np.int64)
            pointers = self.pointers[start : start + 2**20]
            wrong = (lengths < 0) | (pointers < 0) | (pointers > bin_bytes - lengths * self.dtype.itemsize)
            if wrong.any():
                place = int(wrong.argmax())
                got = f"sequence {start + place}: {lengths[place]} tokens at byte {pointers[place]}"
                raise self._damaged(f"{got}, of a .bin file of {bin_bytes}")

    def _damaged(self, got: str) -> DataError:
        problem = Problem(f"{self.path}: {got}", "a Megatron index that is whole, and its .bin file")
        return DataError(problem, where=self.path)


class MegatronSequences:
    """The sequences of Megatron's files; `prefixes`: their names without `.bin` and `.idx`."""

    noun = "sequence"

    def __init__(self, name: str, prefixes: Sequence[str]) -> None:
        self.name, self._prefixes = name, prefixes
        self.paths = [f"{prefix}.bin" for prefix in prefixes]
        self._indexes, self.files = [_Index(f"{prefix}.idx") for prefix in prefixes], PositionedFiles(self.paths)
        for index, size in zip(self._indexes, self.files.sizes, strict=True):
            index.check(size)
        self.shard_sizes = [index.num_sequences for index in self._indexes]

    def __reduce__(self) -> Any:  # to a worker process goes nothing that is mapped
        return MegatronSequences, (self.name, self._prefixes)

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        index = self._indexes[file]
        found = []
        for record in records:
            num_bytes = int(index.lengths[record]) * index.dtype.itemsize
            content = self.files.read(file, int(index.pointers[record]), num_bytes)
            tokens = np.frombuffer(content, dtype=index.dtype)
            found.append({"tokens": tokens.astype(index.dtype.newbyteorder("="))})  # also: a copy that may be written
        return found


class MegatronTokens:
    """The tokens of Megatron's files, laid end to end as they are in the .bin files: a row for `TokenSource`."""

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        self.name = name
        indexes = [_Index(f"{path}.idx") for path in paths]
        if len({index.dtype for index in indexes}) > 1:
            got = ", ".join(f"{os.path.basename(index.path)} {index.dtype}" for index in indexes[:8])
            raise DataError(Problem(f"tokens of several dtypes: {got}", "one dtype"), where=name)
        self._dtype = indexes[0].dtype
        if self._dtype.kind == "f":
            raise DataError(Problem(f"tokens of {self._dtype}", "whole numbers"), where=name)
        self._files = PositionedFiles([f"{path}.bin" for path in paths])
        for index, size in zip(indexes, self._files.sizes, strict=True):
            index.check(size)
            # Tokens that no sequence has, or a second sequence has too, would be in a row, or be missing in it.
            if int(index.lengths.sum(dtype=np.int64)) * self._dtype.itemsize != size:
                got = f"{index.path}: sequences that are not all of the .bin file of {size} bytes"
                raise DataError(Problem(got, "each token in one sequence"), where=index.path)
        self._ends = np.cumsum([size // self._dtype.itemsize for size in self._files.sizes], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` tokens: int64 [B, length]. Raises IndexError outside the tokens."""
        return read_rows(self._ends, starts, length, np.int64, self._read_part)

    def _read_part(self, file: int, first: int, count: int) -> np.ndarray:
        item = self._dtype.itemsize
        try:
            return np.frombuffer(self._files.read(file, first * item, count * item), dtype=self._dtype)
        except (ValueError, OSError) as error:
            path = self._files.paths[file]
            problem = Problem(f"{path}, token {first}: {error}", "a file that can be read")
            raise DataError(problem, where=path) from error
