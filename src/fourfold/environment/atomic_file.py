"""Atomic files: a reader sees a file's old content or its new content, never a part of it.

Law: new content is written under another name in the same folder, and renamed; a failed write leaves the old file. What
is no file, such as a device or a pipe, is written to, not replaced.
"""

import contextlib
import os
from pathlib import Path

PARTIAL_SUFFIX = ".part"


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Give a file new content. `durable`: it is on the disk when this returns. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        partial.write_bytes(content)
        if durable:
            fsync_path(partial)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def fsync_path(path: Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
