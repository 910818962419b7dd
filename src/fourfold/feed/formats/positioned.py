"""Positioned reads of many files: `pread` at an offset, with a bounded number of files open.

Law: no more is read, and no more memory is reserved, than the file has: a range is checked against its size first.
"""

import functools
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fourfold.feed.pack.files import MAX_OPEN, ShardFile
from fourfold.feed.unpacked import check_fits, load_json
from fourfold.words.errors import DataError, Problem, os_error_text


def file_size(path: str) -> int:
    """The bytes of a file. Raises DataError if it cannot be read, or is a folder, a pipe or a device."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:  # of a name that no file can have
        reason = os_error_text(error) if isinstance(error, OSError) else str(error)
        raise DataError(Problem(f"{path}: {reason}", "a file that can be read"), where=path) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(Problem(f"{path} is no regular file", "a file that can be read"), where=path)
    return found.st_size


def read_json(path: Path, entries: Callable[[Any], Any], max_bytes: int, need: str) -> list[dict[str, Any]]:
    """The objects that `entries` finds in an index in JSON. Raises DataError if it is another file than `need` says."""
    size = file_size(str(path))
    if size > max_bytes:
        raise DataError(Problem(f"{path} of {size} bytes", f"at most {max_bytes}"), where=str(path))
    try:
        found = entries(load_json(path.read_bytes()))
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise ValueError("no list of objects")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{path}: {type(error).__name__}: {str(error)[:200]}"
        raise DataError(Problem(got, need), where=str(path)) from error
    return found


class PositionedFiles:
    """Files that are read by position, from any thread."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths, self.sizes = list(paths), [file_size(path) for path in paths]
        self.bytes_read, self._lock = 0, threading.Lock()
        self._opened = functools.lru_cache(MAX_OPEN)(ShardFile.open)

    def __reduce__(self) -> Any:  # to a worker process goes nothing that is open
        return PositionedFiles, (self.paths,)

    def read(self, file: int, offset: int, length: int) -> bytes:
        """The bytes [offset, offset + length). Raises ValueError if the file has not got them, or memory no room."""
        size = self.sizes[file]
        if not 0 <= offset <= size or not 0 <= length <= size - offset:
            raise ValueError(f"bytes {offset} to {offset + length} of a file of {size}")
        check_fits(length, "a record", times=2)  # and its values; a file with holes has it without such a disk
        opened, parts, done = self._opened(self.paths[file]), list[bytes](), 0
        while done < length:  # a read of more than 2 GiB is cut short
            part = os.pread(opened.descriptor, length - done, offset + done)
            if not part:
                raise ValueError(f"the file ends at byte {offset + done}; it had {size}")
            parts.append(part)
            done += len(part)
        self.add_bytes_read(length)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def add_bytes_read(self, count: int) -> None:
        """Count what was read."""
        with self._lock:
            self.bytes_read += count
