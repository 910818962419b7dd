"""Page cache: which part of files is in it, and how to drop them from it.

Law: files that are to be dropped have been fsynced; the kernel keeps pages that are not on the disk yet.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

MAX_SAMPLED_FILES = 64


def drop_from_page_cache(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, if no other process uses them."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def cached_fraction(paths: Sequence[Path]) -> float | None:
    """The part of the bytes of files, of some of many, that is in the page cache; None if the kernel does not say."""
    stride = max(1, len(paths) // MAX_SAMPLED_FILES)
    cached = pages = 0
    for path in paths[::stride]:
        counts = _count_pages(path)
        if counts is None:
            return None
        cached, pages = cached + counts[0], pages + counts[1]
    return cached / pages if pages else None


def _count_pages(path: Path) -> tuple[int, int] | None:
    """How many pages of a file are in the page cache, and how many it has."""
    size = path.stat().st_size
    if size == 0:
        return 0, 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        num_pages = -(-size // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * num_pages)()
        # A private map: mincore tells of the file's pages, and no page is copied.
        view = (ctypes.c_char * size).from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(view), ctypes.c_size_t(size), states)
        del view
        return None if failed else (int((np.frombuffer(memoryview(states), dtype=np.uint8) & 1).sum()), num_pages)
