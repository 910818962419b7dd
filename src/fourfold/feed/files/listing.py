"""Listing: the files of a folder, of one kind, in an order that does not depend on the file system.

kind  what the suffix of a file says that it is
Law: the files of a folder are sorted by their paths below it; hidden ones are left out.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fourfold.feed.unpacked import check_fits
from fourfold.words.errors import DataError, Problem, os_error_text

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
        names = sorted(_below(str(path), ""))
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


def _below(root: str, folder: str) -> Iterator[str]:
    with os.scandir(os.path.join(root, folder)) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir():
                yield from _below(root, name)
            else:
                yield name


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
