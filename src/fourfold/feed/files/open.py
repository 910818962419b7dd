"""Open: plain files at a path, as a source.

Law: what is opened follows from the names of the files alone.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold.feed.files.arrays import ArrayFiles, ArrayRows
from fourfold.feed.files.images import ImageFolder
from fourfold.feed.files.lines import open_csv, open_jsonl, open_text
from fourfold.feed.files.listing import Listing, list_files


def open_files(path: str | os.PathLike[str]) -> Any:
    """The source of the files at a path: one file, or a folder of files of one kind; None if they are of no known kind.

    Raises DataError if there are files of several kinds, or they are damaged.
    """
    given = Path(path)
    listing = list_files(given)
    if listing is None:
        return None
    if given.is_file() and listing.kind in ("npy", "npz"):
        return ArrayRows(listing)
    return OPENERS[listing.kind](listing)


OPENERS: dict[str, Callable[[Listing], Any]] = {
    "images": ImageFolder,
    "npy": ArrayFiles,
    "npz": ArrayFiles,
    "text": open_text,
    "jsonl": open_jsonl,
    "csv": open_csv,
}
