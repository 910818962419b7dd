"""Data files: which files a path or a pattern stands for. No torch, so that what is not there is said at once."""

import glob
import os
from pathlib import Path

from fourfold.words.errors import DataError, Problem, closest_match

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
