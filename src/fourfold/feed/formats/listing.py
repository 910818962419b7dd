"""Listing: which files a path or a pattern stands for. No torch, so that what is not there is said at once.

Law: hidden files of a folder are left out.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fourfold.words.errors import DataError, Problem, closest_match

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
        found = set(glob.glob(str(path), recursive=True))  # `**` twice in a pattern finds a file in several ways
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
