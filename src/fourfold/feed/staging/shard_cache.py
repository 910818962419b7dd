"""Shard cache: copies of shards in a folder of a node's own disk, shared by all processes of the node.

part       a copy that is being written; its final size is reserved on the disk before the first byte
held       a copy that some process has open; it stays until all of them have closed it
room       what `max_bytes` leaves, with all copies that are held
Law: a copy that can be opened is whole and has the digest of its shard; copies and parts together have at most
`max_bytes`; a process that is killed at any point leaves nothing that another one waits for or believes.

Locks are those of `flock`, so they end with their process. One on `NAME.lock` is held while NAME is copied, a shared
one on a copy by each process that has it open, and one on `.cache.lock` while room is made.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from fourfold.words.errors import DataError, Problem

CHUNK_BYTES = 8 * 2**20
LOCK_SUFFIX, PART_SUFFIX, CACHE_LOCK = ".lock", ".part", ".cache.lock"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Shard(NamedTuple):
    """A file of the origin.

    name    without folders
    digest  its xxh3_128, in hexadecimal digits
    """

    name: str
    num_bytes: int
    digest: str


ReadRange = Callable[[str, int, int], bytes]
"""(name, start, stop) -> these bytes of a file of the origin."""


class NoRoomError(Exception):
    """The cache, or its disk, has no room for a shard now."""


class StagedFile:
    """A copy that is open. It is not evicted before it is closed."""

    def __init__(self, shard: Shard, descriptor: int) -> None:
        self.shard, self.descriptor = shard, descriptor

    @property
    def is_closed(self) -> bool:
        return self.descriptor < 0

    def again(self) -> "StagedFile":
        """The same copy, which is then held until both are closed: a lock of `flock` belongs to the opened file."""
        return StagedFile(self.shard, os.dup(self.descriptor))

    def close(self) -> None:
        """Give up the copy: it may be evicted from now on, unless another process has it open."""
        if not self.is_closed:
            os.close(self.descriptor)
            self.descriptor = -1


class ShardCache:
    """The copies in one folder. `max_bytes` counts copies and parts of all processes that use the folder."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        """Raises DataError if the folder cannot be made or written."""
        self.folder, self.max_bytes = Path(folder), max_bytes
        self.has_logged_room = False  # that it lacks room: said once, and not in each epoch
        if max_bytes < 1:
            raise DataError(Problem(f"a cache of {max_bytes} bytes", "1 or more"), where=str(folder))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.folder / CACHE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            got = f"{self.folder}: {error.strerror or error}"
            raise DataError(Problem(got, "a folder that can be written"), where="the cache of the feed") from error

    def open(self, shard: Shard) -> StagedFile | None:
        """The copy of a shard, held; None if there is none."""
        path = self.folder / shard.name
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(descriptor, path):
                break
            os.close(descriptor)  # evicted between the two calls; perhaps it has been copied again
        if os.fstat(descriptor).st_size != shard.num_bytes:  # of another data set with the same name
            os.close(descriptor)
            got = f"{path} of {os.stat(path).st_size} bytes"
            raise DataError(Problem(got, f"{shard.num_bytes}, or no file", "an empty folder for each data set"))
        os.utime(descriptor)  # the time of its last use decides what is evicted
        return StagedFile(shard, descriptor)

    def copy(self, shard: Shard, read: ReadRange) -> StagedFile:
        """The copy of a shard, made if there is none. If another process is making it, wait for that.

        Raises NoRoomError if there is no room, and DataError if the shard does not have its digest.
        """
        _check_name(shard.name)
        with self._locked(shard.name + LOCK_SUFFIX):
            staged = self.open(shard)
            if staged is None:
                try:
                    self._write(shard, read)
                except OSError as error:
                    if error.errno in NO_SPACE:  # a full disk is no room, like a full cache
                        raise NoRoomError from error
                    raise
                staged = self.open(shard)
        if staged is None:  # evicted at once, to make room for another process
            raise NoRoomError
        return staged

    def _write(self, shard: Shard, read: ReadRange) -> None:
        part = self.folder / (shard.name + PART_SUFFIX)
        with contextlib.ExitStack() as undo:
            with self._locked(CACHE_LOCK):
                self._make_room(shard.num_bytes, without=part.name)
                undo.callback(part.unlink, missing_ok=True)
                descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, descriptor)
                if shard.num_bytes:
                    os.posix_fallocate(descriptor, 0, shard.num_bytes)
            digest = xxhash.xxh3_128()
            for start in range(0, shard.num_bytes, CHUNK_BYTES):
                chunk = read(shard.name, start, min(start + CHUNK_BYTES, shard.num_bytes))
                digest.update(chunk)
                _write_all(descriptor, chunk, start)
            if digest.hexdigest() != shard.digest:
                got = f"{shard.name} with digest {digest.hexdigest()}"
                raise DataError(Problem(got, f"{shard.digest}, as its manifest says", "the file as it was packed"))
            os.fsync(descriptor)  # a copy that outlives a power failure is whole
            with self._locked(CACHE_LOCK):  # a process that makes room counts either the part or the copy
                part.rename(self.folder / shard.name)

    def _make_room(self, num_bytes: int, *, without: str) -> None:
        """Evict copies that nobody holds, the least recently used first. `without`: a part that will be overwritten."""
        found = self._files(without)
        excess = sum(each.st_size for each in found.values()) + num_bytes - self.max_bytes
        if excess <= 0:
            return
        evictable = sorted((n for n in found if not n.endswith(PART_SUFFIX)), key=lambda n: found[n].st_mtime_ns)
        parts = [name for name in found if name.endswith(PART_SUFFIX)]
        for name in [*parts, *evictable]:
            if self._evict(name):
                excess -= found[name].st_size
            if excess <= 0:
                return
        raise NoRoomError

    def _evict(self, name: str) -> bool:
        """Remove a copy that nobody holds, or a part whose process is gone."""
        path = self.folder / name
        is_part = name.endswith(PART_SUFFIX)
        locked = self.folder / (name.removesuffix(PART_SUFFIX) + LOCK_SUFFIX) if is_part else path
        with contextlib.ExitStack() as stack:
            try:
                descriptor = os.open(locked, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except (BlockingIOError, FileNotFoundError):
                return False
        return True

    def _files(self, without: str) -> dict[str, os.stat_result]:
        """All copies and parts but one, by name."""
        found = {}
        with os.scandir(self.folder) as entries:
            for each in entries:
                if each.name != without and not each.name.endswith(LOCK_SUFFIX) and each.is_file():
                    with contextlib.suppress(FileNotFoundError):  # a part whose copying has just failed
                        found[each.name] = each.stat()
        return found

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether this open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write_all(descriptor: int, chunk: bytes, start: int) -> None:
    view = memoryview(chunk)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _check_name(name: str) -> None:
    is_plain = name and "/" not in name and "\0" not in name and not name.startswith(".")
    if not is_plain or name.endswith((LOCK_SUFFIX, PART_SUFFIX)):
        raise DataError(Problem(f"a shard named {name!r}", "a name of a file, without folders"))
