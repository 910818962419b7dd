"""Temporary folders: private folders that do not outlive their process for long.

owner     the process that made a folder; it holds the folder's flock, which the kernel releases when the process ends
leftover  a folder whose owner was killed: nobody holds its lock
Law: whoever makes a folder first removes the leftovers of this user and host beside it, and never a folder in use.

A lock is seen across containers that share a folder, where process numbers are not. Between hosts it may not be, so
the host is part of the name.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REMOVE_SECONDS, POLL_SECONDS = 2.0, 0.05


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Within: a new folder that only this user may enter. `parent`: the temporary folder of the system if None.

    To write something that appears when it is whole, make it in here, and rename it into `parent`. Raises OSError.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    prefix = f".fourfold-{os.uname().nodename}-"
    _remove_leftovers(parent, prefix)
    folder, lock = _make(parent, prefix)
    try:
        yield folder
    finally:
        try:
            _remove(folder)
        finally:
            os.close(lock)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # another process took it for a leftover before it was locked
            lock = _open(folder)
            with contextlib.suppress(OSError):  # a file system without locks: nobody can lock it and remove it
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    try:
        names = os.listdir(parent)
    except PermissionError:  # some temporary folders may be written and not read
        return
    for name in names:
        if not name.startswith(prefix) or "-" in name.removeprefix(prefix):  # of a host with a longer name
            continue
        with contextlib.suppress(OSError):  # in use, another user's, or just removed by another process
            lock = _open(parent / name)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(parent / name)
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder. A process that is being ended may write into it for another moment.

    What cannot be removed is a leftover, such as the files that NFS keeps while they are mapped.
    """
    deadline = time.monotonic() + REMOVE_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        try:
            shutil.rmtree(folder)
        except OSError:
            time.sleep(POLL_SECONDS)
