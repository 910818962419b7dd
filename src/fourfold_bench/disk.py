"""Disk: what this storage delivers, measured beside the emulated training: its ceiling, and a checkpoint.

ceiling     bytes a second of reads of a record's size at random places of the same files, by as many threads as read
            for all accelerators, past the page cache (O_DIRECT) where the file system allows it
checkpoint  a file is written and fsynced, dropped from the page cache, and read back, as DLIO does
Law: whether the page cache took part is said; what is counted is what the kernel has returned, and a short read is an
error, never a shorter record. Files that are to be dropped have been fsynced: the kernel keeps pages that are not on
the disk yet. A checkpoint that reads back otherwise than it was written is an error.
"""

import ctypes
import io
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from fourfold.words.errors import DataError, Problem, os_error_text

# ---- past the page cache ---------------------------------------------------------------------------------------------


ALIGNMENT = 4096  # of offset, length and memory
MAX_READ_BYTES = 2**24  # of one call


def direct_problem(path: Path) -> str:
    """Why this file cannot be read past the page cache; "" if it can."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return f"O_DIRECT: {os.strerror(error.errno or 0).lower()}"
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(file, [page], 0)
        return ""
    except OSError as error:
        return f"O_DIRECT: {os.strerror(error.errno or 0).lower()}"
    finally:
        os.close(file)


class ReadBuffer:
    """Aligned memory of one thread, as large as the largest range that was read into it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def reserve(self, num_bytes: int) -> np.ndarray:
        """The first `num_bytes` of the buffer, whole blocks: uint8."""
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if rounded > len(self._memory):
            self._memory = np.frombuffer(mmap.mmap(-1, rounded), dtype=np.uint8)
        return self._memory[:rounded]


def read_range(file: int, start: int, stop: int, buffer: ReadBuffer) -> tuple[np.ndarray, int]:
    """Bytes [start, stop) of a file opened with O_DIRECT, in the buffer, and how many bytes were read for them.

    Fewer bytes if the file ends before.
    """
    begin = start // ALIGNMENT * ALIGNMENT
    memory = buffer.reserve(stop - begin)
    done = 0
    while done < stop - begin:
        count = os.preadv(file, [memory[done : done + MAX_READ_BYTES].data], begin + done)
        done += count
        if not count or done % ALIGNMENT:  # the end of the file
            break
    return memory[start - begin : min(done, stop - begin)], done


# ---- the page cache --------------------------------------------------------------------------------------------------


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


# ---- what is measured ------------------------------------------------------------------------------------------------


MAX_BLOCK_BYTES = 2**20
MAX_THREADS = 16
CEILING_SECONDS = 1.5
CHECKPOINT_BLOCK_BYTES = 2**24


class Ceiling(NamedTuple):
    """What the disk delivered. `problem`: why the reads were not direct; ""  if they were."""

    bytes_per_second: float
    block_bytes: int
    threads: int
    problem: str = ""


def measure_ceiling(
    paths: Sequence[Path], *, record_bytes: int, threads: int, seconds: float = CEILING_SECONDS
) -> Ceiling:
    """Read blocks at random places of these files for a while."""
    problem = direct_problem(paths[0])
    if problem:
        drop_from_page_cache(paths)
    block = max(ALIGNMENT, min(MAX_BLOCK_BYTES, -(-record_bytes // ALIGNMENT) * ALIGNMENT))
    threads = min(threads, MAX_THREADS)
    begin = time.monotonic()
    deadline = begin + seconds
    flags = os.O_RDONLY if problem else os.O_RDONLY | os.O_DIRECT
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_read_blocks, paths, block, flags, deadline, seed) for seed in range(threads)]
        num_bytes = sum(future.result() for future in futures)
    return Ceiling(num_bytes / (time.monotonic() - begin), block, threads, problem)


def _read_blocks(paths: Sequence[Path], block: int, flags: int, deadline: float, seed: int) -> int:
    """Read runs of up to 16 blocks one after the other, each run at another place. Returns the bytes."""
    rng, memory, done = np.random.default_rng(seed), ReadBuffer().reserve(block), 0
    while time.monotonic() < deadline:
        file = os.open(paths[int(rng.integers(len(paths)))], flags)
        try:
            size = os.fstat(file).st_size
            first = int(rng.integers(-(-size // block)))
            for at in range(first * block, min(size, (first + 16) * block), block):
                done += os.preadv(file, [memory.data], at)
        finally:
            os.close(file)
    return done


class CheckpointTimes(NamedTuple):
    """How long a checkpoint took to write, with fsync, and to read back."""

    num_bytes: int
    write_seconds: float
    read_seconds: float

    @property
    def write_rate(self) -> float:
        return self.num_bytes / self.write_seconds

    @property
    def read_rate(self) -> float:
        return self.num_bytes / self.read_seconds


def measure_checkpoint(folder: Path, num_bytes: int) -> CheckpointTimes:
    """Write, fsync and read back a checkpoint of this size; its file is removed. Raises DataError."""
    path = folder / "checkpoint.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written, write_seconds = _write(path, num_bytes)
        drop_from_page_cache([path])
        read, read_seconds = _read_back(path)
    except OSError as error:
        got = f"a checkpoint of {num_bytes:,} bytes: {os_error_text(error)}"
        raise DataError(Problem(got, "room for it", "checkpoint=BYTES, or checkpoint=0"), where=str(folder)) from None
    finally:
        path.unlink(missing_ok=True)
    if read != written:
        raise DataError(Problem("the checkpoint reads back otherwise", "what was written"), where=str(path))
    return CheckpointTimes(num_bytes, write_seconds, read_seconds)


def _write(path: Path, num_bytes: int) -> tuple[bytes, float]:
    """Write and fsync a file; returns its digest, and the seconds without those of the digest."""
    block = np.random.default_rng(0).integers(0, 256, CHECKPOINT_BLOCK_BYTES, dtype=np.uint8)
    digest, seconds = xxhash.xxh3_64(), 0.0
    with path.open("wb", buffering=0) as file:
        for number, at in enumerate(range(0, num_bytes, len(block))):
            block[:8] = np.frombuffer(number.to_bytes(8, "little"), dtype=np.uint8)
            part = block[: num_bytes - at].data
            digest.update(part)
            begin = time.monotonic()
            _write_all(file, part)
            seconds += time.monotonic() - begin
        begin = time.monotonic()
        os.fsync(file.fileno())
        return digest.digest(), seconds + time.monotonic() - begin


def _write_all(file: io.RawIOBase, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _read_back(path: Path) -> tuple[bytes, float]:
    block, digest, seconds = bytearray(CHECKPOINT_BLOCK_BYTES), xxhash.xxh3_64(), 0.0
    with path.open("rb", buffering=0) as file:
        while True:
            begin = time.monotonic()
            count = file.readinto(block)
            seconds += time.monotonic() - begin
            if not count:
                return digest.digest(), seconds
            digest.update(memoryview(block)[:count])
