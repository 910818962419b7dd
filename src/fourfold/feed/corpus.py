"""Corpus: many text files, read as one row of bytes.

file range  the bytes [start, stop) of one file
corpus      file ranges laid end to end, memory-mapped, never copied as a whole
split       two corpora without a common byte: one to train on, one for validation
Law: whether a file is for validation depends on its path below the root alone, not on where the root is. If a few files
all fall on one side, the last tenth of each is held out instead.
"""

import functools
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from fourfold.feed.source import read_rows
from fourfold.feed.text_path import resolve_text_path
from fourfold.words.errors import DataError, Problem

VALID_ONE_IN = 16  # one file in sixteen is for validation: 6 %
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
TEXT_CHECK_BYTES = 4096
MAX_OPEN_MAPS = 4096
LARGE_FILE_BYTES = 2**30


class FileRange(NamedTuple):
    """The bytes [start, stop) of one file."""

    path: Path
    start: int
    stop: int


class Corpus:
    """File ranges laid end to end, as one row of bytes."""

    def __init__(self, file_ranges: Iterable[FileRange]) -> None:
        self.file_ranges = tuple(file_range for file_range in file_ranges if file_range.stop > file_range.start)
        self.ends = np.cumsum([file_range.stop - file_range.start for file_range in self.file_ranges], dtype=np.int64)
        # A bounded number of maps: a folder of a million files must stay below the kernel's limit.
        self._map_cached = functools.lru_cache(maxsize=MAX_OPEN_MAPS)(_map_file)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.file_ranges else 0

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` bytes from each of B starts: uint8 [B, length]. Raises IndexError outside the corpus."""
        return read_rows(self.ends, starts, length, np.uint8, self._read_part)

    def _read_part(self, part: int, first: int, count: int) -> np.ndarray:
        file_range = self.file_ranges[part]
        return self._map_cached(file_range)[file_range.start + first : file_range.start + first + count]


class CorpusSplit(NamedTuple):
    """Two corpora without a common byte."""

    train: Corpus
    valid: Corpus


def is_validation_file(relative: str) -> bool:
    """Whether a file is for validation; `relative` is its path below the root, with `/` between names."""
    return xxhash.xxh3_64_intdigest(relative.encode("utf-8", "surrogateescape")) % VALID_ONE_IN == 0


def standard_library() -> CorpusSplit:
    """The source code of Python's standard library. Raises DataError if it is not installed as files."""
    root = Path(sysconfig.get_path("stdlib"))
    file_ranges = [file_range for file_range in _files(root) if file_range.path.suffix == ".py"]
    if not file_ranges:
        raise DataError(
            Problem(f"no .py file in {root}", "the standard library's sources", "data=PATH, any folder of text"),
            where="the standard library",
        )
    return _split_by_path(root, file_ranges)


def open_text(path: str | os.PathLike[str] | None = None) -> CorpusSplit:
    """The standard library's source code, or the text at `path`: a folder, or a file whose last tenth is held out.

    Raises DataError if there is nothing at `path`, or no text.
    """
    if path is None:
        return standard_library()
    root = resolve_text_path(path)
    if root.is_file():
        return _split_each_file([FileRange(root, 0, root.stat().st_size)])
    file_ranges = [file_range for file_range in _files(root) if _is_text(file_range.path)]
    if not file_ranges:
        raise DataError(
            Problem(f"no text in {root}", "files that can be read and hold no zero byte", "another folder, or a file"),
            where=f"data={path}",
        )
    return _split_by_path(root, file_ranges)


def _map_file(file_range: FileRange) -> np.ndarray:
    """The file's first `stop` bytes, mapped: uint8 [stop]."""
    try:
        if file_range.stop >= LARGE_FILE_BYTES:
            # Read-only: torch's map is writable, and the kernel refuses a writable map that is larger than its memory.
            return np.memmap(file_range.path, dtype=np.uint8, mode="r", shape=(file_range.stop,))
        # torch's map, not numpy's: Python's mmap keeps a file descriptor open per map, and the limit is often 1024.
        return torch.from_file(str(file_range.path), shared=False, size=file_range.stop, dtype=torch.uint8).numpy()
    except (RuntimeError, OSError, ValueError) as error:
        raise DataError(
            Problem(
                f"{file_range.path} cannot be mapped: {str(error).splitlines()[0]}",
                f"its {file_range.stop} bytes, as when the folder was read",
            )
        ) from error


def _files(root: Path) -> Iterator[FileRange]:
    """All non-empty files below a folder, sorted, without hidden ones and installed packages."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(folder, name)
            if path.is_file() and (size := path.stat().st_size):
                yield FileRange(path, 0, size)


def _split_by_path(root: Path, file_ranges: Sequence[FileRange]) -> CorpusSplit:
    held_out = [is_validation_file(file_range.path.relative_to(root).as_posix()) for file_range in file_ranges]
    if all(held_out) or not any(held_out):
        return _split_each_file(file_ranges)  # a few files, all on one side
    return CorpusSplit(
        train=Corpus(file_range for file_range, out in zip(file_ranges, held_out, strict=True) if not out),
        valid=Corpus(file_range for file_range, out in zip(file_ranges, held_out, strict=True) if out),
    )


def _split_each_file(file_ranges: Sequence[FileRange]) -> CorpusSplit:
    cuts = [file_range.stop - file_range.stop // 10 for file_range in file_ranges]
    return CorpusSplit(
        train=Corpus(file_range._replace(stop=cut) for file_range, cut in zip(file_ranges, cuts, strict=True)),
        valid=Corpus(file_range._replace(start=cut) for file_range, cut in zip(file_ranges, cuts, strict=True)),
    )


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(TEXT_CHECK_BYTES)
    except OSError:
        return False
