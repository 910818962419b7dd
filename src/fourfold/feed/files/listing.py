"""Listing: which files a path or a pattern stands for. No torch, so that what is not there is said at once.

kind  what the suffix of a file says that it is
Law: the files of a folder are sorted by their paths below it, whatever the file system; hidden ones are left out.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fourfold.feed.unpacked import check_fits
from fourfold.words.errors import DataError, Problem, closest_match, os_error_text

# ---- a folder --------------------------------------------------------------------------------------------------------


KIND_OF_SUFFIX = {
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"), "images"),
    ".npy": "npy",
    ".npz": "npz",
    **dict.fromkeys((".txt", ".text"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}


class Listing(NamedTuple):
    """The files of one kind: their folder, and their paths below it. Of a single file: its own folder and name."""

    kind: str
    root: str
    names: list[str]

    def path(self, number: int) -> str:
        return os.path.join(self.root, self.names[number])


def kind_of(name: str) -> str | None:
    """What a file is by its suffix; None: something else."""
    return KIND_OF_SUFFIX.get(os.path.splitext(name)[1].lower())


def list_files(path: Path) -> Listing | None:
    """The files at a path; None if they are of no kind that this package reads.

    Raises DataError if a folder holds files of several kinds, or cannot be read.
    """
    if path.is_file():
        kind = kind_of(path.name)
        return None if kind is None else Listing(kind, str(path.parent), [path.name])
    try:
        names = sorted(names_below(str(path)))
    except OSError as error:
        problem = Problem(f"{error.filename or path}: {os_error_text(error)}", "a folder that can be read")
        raise DataError(problem, where=str(path)) from error
    counts = Counter(kind_of(name) for name in names)
    known = {kind: count for kind, count in counts.items() if kind is not None}
    if not known:
        return None
    if len(counts) > 1:
        several = ", ".join(f"{count} {kind or 'others'}" for kind, count in counts.items())
        problem = Problem(f"files of several kinds: {several}", "files of one kind", "a folder of these alone")
        raise DataError(problem, where=str(path))
    return Listing(next(iter(known)), str(path), names)


MAX_WAYS = 64  # that lead to one folder: a few folders with two links each to the next have a billion paths


def names_below(root: str) -> Iterator[str]:
    """The files in a folder and below, by their paths in it, but hidden ones. Links to folders are followed.

    Raises DataError where more than MAX_WAYS paths lead to one folder.
    """
    yield from _below(root, "", frozenset({_identity(root)}), Counter())


def _below(root: str, folder: str, around: frozenset[tuple[int, int]], ways: Counter[tuple[int, int]]) -> Iterator[str]:
    with os.scandir(os.path.join(root, folder)) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = f"{folder}/{entry.name}" if folder else entry.name
            if not entry.is_dir():
                yield name
            elif (own := _identity(entry.path)) not in around:  # not a link to a folder that the link is in
                ways[own] += 1
                if ways[own] > MAX_WAYS:
                    got = f"{name}: links make more than {MAX_WAYS} paths to this folder"
                    raise DataError(Problem(got, "a folder in one place", "a folder without these links"), where=root)
                yield from _below(root, name, around | {own}, ways)


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def read_file(path: str) -> bytes:
    """A file's content. Raises OSError, and ValueError for one that does not fit into memory."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        check_fits(size, "a file")
        content = os.read(file, size)
        while len(content) < size:
            more = os.read(file, size - len(content))
            if not more:
                raise OSError(f"it ends after {len(content)} of {size} bytes")
            content += more
    finally:
        os.close(file)
    return content


# ---- a path or a pattern ---------------------------------------------------------------------------------------------


KNOWN = (
    "a pack; images, .npy, .npz, .txt, .jsonl, .csv, .tsv; .parquet, .arrow, .feather; a folder of `datasets` or MDS; "
    ".tar (WebDataset), .tfrecord, .h5, Megatron's .bin and .idx"
)


def find_files(path: Path) -> list[str] | None:
    """The files at a path, or of a pattern; None: a folder. Raises DataError if nothing is there."""
    if os.path.isdir(path):
        return None
    if os.path.isfile(path):
        return [str(path)]
    if os.path.isfile(f"{path}.idx"):  # Megatron names its files so
        return [f"{path}.bin", f"{path}.idx"]
    if glob.has_magic(str(path)):
        found = glob.glob(str(path), recursive=True)
        if paths := sorted(each for each in found if os.path.isfile(each) and not is_marker(each)):
            return paths
        raise DataError(Problem(f"no file that fits {path}", "at least one"), where=str(path))
    if os.path.exists(path):
        raise DataError(Problem(f"{path} is no file and no folder", KNOWN), where=str(path))
    try:
        close = closest_match(path.name, os.listdir(path.parent))
    except (OSError, ValueError):
        close = None
    raise DataError(Problem(f"nothing at {path}", KNOWN, str(path.parent / close) if close else ""), where=str(path))


def is_marker(path: str) -> bool:
    """Whether a file is a mark of the program that wrote those beside it, such as Spark's `_SUCCESS`: no data."""
    name = os.path.basename(path)
    return name.startswith("_") and "." not in name
