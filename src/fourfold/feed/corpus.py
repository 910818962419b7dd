"""Text as bytes: many files read as one long row.

piece    the bytes [start, stop) of one file
corpus   pieces laid end to end, memory-mapped, never copied as a whole
split    two corpora that share no byte: one to train on, one to evaluate on
Law: which side a file falls on is a function of its path below the root alone, never of its place on this machine.
A few files may all fall on one side; then the last tenth of each is held out instead.
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

from fourfold.words.errors import DataError, Problem, closest_match, os_error_text

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
    """Pieces laid end to end, as one row of bytes."""

    def __init__(self, pieces: Iterable[FileRange]) -> None:
        self.file_ranges = tuple(piece for piece in pieces if piece.stop > piece.start)
        self.ends = np.cumsum([piece.stop - piece.start for piece in self.file_ranges], dtype=np.int64)
        # A bounded number of maps, so that a folder of a million files stays below the kernel's limit of maps.
        self._map_cached = functools.lru_cache(maxsize=MAX_OPEN_MAPS)(_map_file)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.file_ranges else 0

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` bytes from each of B starts: uint8 [B, length]. Raises IndexError outside the corpus."""
        firsts = np.asarray(starts, dtype=np.int64)
        if firsts.size and (firsts.min() < 0 or firsts.max() + length > len(self)):
            raise IndexError(f"bytes up to {int(firsts.max()) + length} asked of a corpus of {len(self)}")
        rows = np.empty((firsts.size, length), dtype=np.uint8)
        places = np.searchsorted(self.ends, firsts, side="right")
        for row, place, first in zip(rows, places.tolist(), firsts.tolist(), strict=True):
            self._fill(row, place=place, first=first)
        return rows

    def _fill(self, row: np.ndarray, *, place: int, first: int) -> None:
        filled = 0
        while filled < row.size:
            piece = self.file_ranges[place]
            start = piece.stop - (int(self.ends[place]) - first - filled)
            taken = self._map_cached(piece)[start : start + row.size - filled]
            row[filled : filled + taken.size] = taken
            filled += taken.size
            place += 1


class CorpusSplit(NamedTuple):
    """Two corpora that share no byte."""

    train: Corpus
    valid: Corpus


def is_validation_file(relative: str) -> bool:
    """Whether the file at this path below the root (with `/` between names) is for validation."""
    return xxhash.xxh3_64_intdigest(relative.encode("utf-8", "surrogateescape")) % VALID_ONE_IN == 0


def standard_library() -> CorpusSplit:
    """The sources of the running Python's standard library. Raises DataError where they are not installed as files."""
    root = Path(sysconfig.get_path("stdlib"))
    pieces = [piece for piece in _files(root) if piece.path.suffix == ".py"]
    if not pieces:
        raise DataError(
            Problem(f"no .py file in {root}", "the standard library's sources", "data=PATH, any folder of text"),
            where="the standard library",
        )
    return _split_by_path(root, pieces)


def open_text(path: str | os.PathLike[str] | None = None) -> CorpusSplit:
    """The standard library's sources, or the text at `path`: a folder, or one file whose last tenth is held out.

    Raises DataError where there is nothing at `path`, or no text.
    """
    if path is None:
        return standard_library()
    root = resolve_text_path(path)
    if root.is_file():
        return _split_each_file([FileRange(root, 0, root.stat().st_size)])
    pieces = [piece for piece in _files(root) if _is_text(piece.path)]
    if not pieces:
        raise DataError(
            Problem(f"no text in {root}", "files that can be read and hold no zero byte", "another folder, or a file"),
            where=f"data={path}",
        )
    return _split_by_path(root, pieces)


def resolve_text_path(path: str | os.PathLike[str]) -> Path:
    """The path, if a readable file or folder is there. Raises DataError."""
    if not str(path):
        got, attempt = "data= with nothing after it", "no data=, for Python's own source code"
        raise DataError(Problem(got, "a file or folder of text", attempt))
    try:
        root = Path(path).expanduser()
        is_there = root.exists()
    except (OSError, RuntimeError) as error:  # too long a name; ~ of a user who is not there
        got = f"{str(path)[:60]}: {os_error_text(error) if isinstance(error, OSError) else str(error)}"
        raise DataError(Problem(got, "a file or folder of text"), where="data") from None
    if not is_there:
        close = closest_match(root.name, _names(root.parent))
        attempt = str(root.parent / close) if close else "no data=, for Python's own source code"
        raise DataError(Problem(f"nothing at {root}", "a file or folder of text", attempt), where=f"data={path}")
    if not (root.is_file() or root.is_dir()):
        raise DataError(Problem(f"{root} is neither file nor folder", "text that can be mapped"), where=f"data={path}")
    if not os.access(root, os.R_OK):
        raise DataError(Problem(f"{root} may not be read", "the right to read", f"chmod u+r {root}"), where=str(path))
    return root


def _map_file(piece: FileRange) -> np.ndarray:
    """The file's first `stop` bytes, mapped: uint8 [stop]."""
    try:
        if piece.stop >= LARGE_FILE_BYTES:
            # Read only: torch's map may be written to, so the kernel refuses one that is larger than its memory.
            return np.memmap(piece.path, dtype=np.uint8, mode="r", shape=(piece.stop,))
        # torch's map, not numpy's: Python's mmap holds a file descriptor per map, and 1024 are allowed.
        return torch.from_file(str(piece.path), shared=False, size=piece.stop, dtype=torch.uint8).numpy()
    except (RuntimeError, OSError, ValueError) as error:
        raise DataError(
            Problem(f"{piece.path} cannot be mapped: {str(error).splitlines()[0]}", f"its {piece.stop} bytes, as found")
        ) from error


def _files(root: Path) -> Iterator[FileRange]:
    """All non-empty files below a folder, in sorted order; hidden ones and installed packages left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(folder, name)
            if path.is_file() and (size := path.stat().st_size):
                yield FileRange(path, 0, size)


def _split_by_path(root: Path, pieces: Sequence[FileRange]) -> CorpusSplit:
    held_out = [is_validation_file(piece.path.relative_to(root).as_posix()) for piece in pieces]
    if all(held_out) or not any(held_out):
        return _split_each_file(pieces)  # a few files, which fell all on one side
    return CorpusSplit(
        train=Corpus(piece for piece, out in zip(pieces, held_out, strict=True) if not out),
        valid=Corpus(piece for piece, out in zip(pieces, held_out, strict=True) if out),
    )


def _split_each_file(pieces: Sequence[FileRange]) -> CorpusSplit:
    cuts = [piece.stop - piece.stop // 10 for piece in pieces]
    return CorpusSplit(
        train=Corpus(piece._replace(stop=cut) for piece, cut in zip(pieces, cuts, strict=True)),
        valid=Corpus(piece._replace(start=cut) for piece, cut in zip(pieces, cuts, strict=True)),
    )


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(TEXT_CHECK_BYTES)
    except OSError:
        return False


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []
