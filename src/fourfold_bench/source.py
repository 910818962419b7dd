"""Source of an emulated training: its files, generated once, and read whole as training would, every byte counted.

record    bytes that do not compress, their number first; their length is a function of (seed, record)
data set  files of records in one folder, and `data.json`, which says what they are; it is written last
sample    (uint8 [sample_bytes], its number): the first bytes of a record, or the record repeated
direct    past the page cache, with O_DIRECT
Law: a folder holds the data set that its name says, or is completed to it; a file is written aside, and then renamed.
`bytes_read` counts what the kernel returned, never a configured size. A record is read whole, whatever is kept.

B batch
"""

import functools
import hashlib
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.environment.temporary_folder import temporary_folder
from fourfold.feed.formats import arrays
from fourfold.words.errors import DataError, Problem, closest_match, os_error_text
from fourfold.words.units import format_bytes
from fourfold_bench.disk import ReadBuffer, read_range
from fourfold_bench.workload import Seconds

# ---- files -----------------------------------------------------------------------------------------------------------


DESCRIPTION_FILE = "data.json"
BLOCK_BYTES = 2**24
LEAST_RECORD_BYTES = 16
NUMBER_BYTES = 8  # with which a record begins: its own
NPZ_KEY = "x"  # DLIO's; `_write_npz` writes it


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """What is in the files of a data set."""

    format: str
    num_files: int
    samples_per_file: int
    record_bytes: int
    record_bytes_stdev: int = 0
    seed: int = 0

    def __len__(self) -> int:
        return self.num_files * self.samples_per_file

    @property
    def num_bytes(self) -> int:
        """About so many bytes of records."""
        return len(self) * self.record_bytes

    def folder_name(self, name: str) -> str:
        """The name of the folder of this data set; another shape has another one."""
        digest = hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=4).hexdigest()
        return f"{name}-{self.format}-{len(self)}x{self.record_bytes}-{digest}"

    def path_of(self, folder: Path, file: int) -> Path:
        # Not more than 1000 files in a folder.
        return folder / f"{file // 1000:03}" / f"{file % 1000:03}.{self.format}"

    def paths(self, folder: Path) -> list[Path]:
        return [self.path_of(folder, file) for file in range(self.num_files)]

    def record_length(self, record: int) -> int:
        """The bytes of a record, at least a tenth of the mean."""
        if not self.record_bytes_stdev:
            return self.record_bytes
        drawn = np.random.default_rng((self.seed, record)).normal(self.record_bytes, self.record_bytes_stdev)
        return max(LEAST_RECORD_BYTES, self.record_bytes // 10, round(drawn))


def _write_npy(file: BinaryIO, records: np.ndarray) -> None:
    np.lib.format.write_array(file, records, allow_pickle=False)


def _write_npz(file: BinaryIO, records: np.ndarray) -> None:
    np.savez(file, allow_pickle=False, **{NPZ_KEY: records})


# How a file of records is written: uint8 [bytes] of one record, or [records, bytes]. A further format is a row here and
# one of `bench/source.READERS`.
WRITERS: dict[str, Callable[[BinaryIO, np.ndarray], None]] = {"npy": _write_npy, "npz": _write_npz}


def check_format(shape: DataShape) -> None:
    """Raise DataError for a data set that cannot be written."""
    problems = []
    if shape.format not in WRITERS:
        close = closest_match(shape.format, WRITERS) or "npy"
        problems.append(Problem(f"format = {shape.format}", f"one of {', '.join(WRITERS)}", f"format={close}"))
    if shape.samples_per_file > 1 and shape.record_bytes_stdev:
        got = f"{shape.samples_per_file} records a file, of lengths that vary by {shape.record_bytes_stdev} bytes"
        problems.append(Problem(got, "one record a file, or records of one length", "num_samples_per_file: 1"))
    if problems:
        raise DataError(problems, where="the data to generate")


def generate(
    shape: DataShape, folder: Path, *, threads: int = 1, progress: Callable[[int], None] = lambda done: None
) -> bool:
    """Write the files of a data set that are not there yet; returns whether there were any. Raises DataError.

    `progress(files)` is called as files are written.
    """
    check_format(shape)
    description = folder / DESCRIPTION_FILE
    expected = asdict(shape)
    if description.is_file() and json.loads(description.read_bytes()) == expected:
        return False
    missing = [file for file in range(shape.num_files) if not shape.path_of(folder, file).is_file()]
    _check_room(shape, folder, len(missing) / max(1, shape.num_files))
    block = np.random.default_rng(shape.seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for done, _ in enumerate(pool.map(lambda file: _write_file(shape, folder, file, block), missing), 1):
                progress(done)
        _write_durably(description, lambda file: file.write(json.dumps(expected, indent=1).encode()))
    except OSError as error:
        got = f"{folder} could not be written: {os_error_text(error)}"
        raise DataError(Problem(got, f"{format_bytes(shape.num_bytes)} of room", "folder=PATH, or samples=…")) from None
    return True


def _check_room(shape: DataShape, folder: Path, part: float) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, needed = shutil.disk_usage(existing).free, part * shape.num_bytes
    if needed > free:
        got = f"{format_bytes(free)} free in {existing}"
        raise DataError(Problem(got, f"{format_bytes(needed)} for {len(shape):,} samples", "samples=…, or folder=PATH"))


def _write_file(shape: DataShape, folder: Path, file: int, block: np.ndarray) -> None:
    first = file * shape.samples_per_file
    lengths = [shape.record_length(first + index) for index in range(shape.samples_per_file)]
    records = np.empty((len(lengths), lengths[0]), dtype=np.uint8)
    for index, row in enumerate(records):
        _fill_record(row, first + index, block)
    path = shape.path_of(folder, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    array = records[0] if shape.samples_per_file == 1 else records
    _write_durably(path, lambda opened: WRITERS[shape.format](opened, array))


def _fill_record(row: np.ndarray, record: int, block: np.ndarray) -> None:
    """Fill a record: its number, then bytes of a random block, from another place for each record."""
    start = record * 4099 % len(block)  # a prime: neighbours do not share pages
    for at in range(0, len(row), len(block)):
        part = row[at : at + len(block)]
        tail = min(len(part), len(block) - start)
        part[:tail], part[tail:] = block[start : start + tail], block[: len(part) - tail]
    row[:NUMBER_BYTES] = np.frombuffer(record.to_bytes(NUMBER_BYTES, "little"), dtype=np.uint8)


def record_number(row: Any) -> int:
    """The number with which a record begins."""
    return int.from_bytes(bytes(row[:NUMBER_BYTES]), "little")


def _write_durably(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file aside, fsync it, and rename it."""
    with temporary_folder(path.parent) as folder:  # another run may write it too
        aside = folder / path.name
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def read_npz(file: BinaryIO, path: Path) -> np.ndarray:
    """The records of an npz file. Raises DataError."""
    try:
        return arrays.read_npz(file)[NPZ_KEY]
    except (*arrays.UNREADABLE, KeyError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str, record: int | None = None) -> DataError:
    """The error of a file that cannot be read."""
    place = str(path) if record is None else f"{path}, record {record}"
    return DataError(Problem(f"{place}: {reason}", "the file as it was generated", "deleting its folder"), where="data")


def _check_array(array_shape: Sequence[int], dtype: np.dtype, shape: DataShape, path: Path) -> None:
    """Raise DataError unless a file's array is what the data set has in a file."""
    is_right = dtype == np.uint8 and (
        len(array_shape) == 1 if shape.samples_per_file == 1 else tuple(array_shape)[:1] == (shape.samples_per_file,)
    )
    if not is_right or len(array_shape) > 2:
        got = f"an array of {dtype} {list(array_shape)}"
        raise _damaged(path, got)


# ---- samples ---------------------------------------------------------------------------------------------------------


PARTS_PER_THREAD = 4  # of a batch: one slow record does not hold up the rest
HEADER_BYTES = 128  # of the files that `files` writes


class Reads(NamedTuple):
    """How records are read."""

    sample_bytes: int
    threads: int = 1
    direct: bool = False
    preprocess: Seconds = Seconds((0.0,))
    seed: int = 0


class _Thread(threading.local):
    """What each reading thread has of its own."""

    def __init__(self) -> None:
        self.buffer = ReadBuffer()


class FileSource:
    """The samples of a data set in a folder."""

    def __init__(
        self, shape: DataShape, folder: Path, reads: Reads, *, path_of: Callable[[int], Path] | None = None
    ) -> None:
        """`path_of`: where a file is to be read; None: in the folder."""
        self._path_of = path_of or functools.partial(shape.path_of, folder)
        self.shape, self.folder, self._reads = shape, folder, reads
        self.bytes_read = 0
        self._read = READERS[shape.format]
        self._pool: ThreadPoolExecutor | None = None
        self._thread = _Thread()
        self._places: dict[Path, _Place] = {}
        self._rng = np.random.default_rng((reads.seed, 1))

    @property
    def shard_sizes(self) -> Sequence[int]:
        return [self.shape.samples_per_file] * self.shape.num_files

    def __len__(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        inputs, targets = self.fetch([index])
        return inputs[0], targets[0]

    def sample_key(self, index: int) -> str:
        """The file and the record of a sample."""
        file, record = divmod(index, self.shape.samples_per_file)
        return f"{self.shape.path_of(self.folder, file)}, record {record}"

    def fetch(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        """Samples: uint8 [B, sample_bytes], and their numbers: int64 [B]."""
        inputs = torch.empty((len(indices), self._reads.sample_bytes), dtype=torch.uint8)
        rows = inputs.numpy()
        pauses = [self._reads.preprocess.draw(self._rng) for _ in indices]
        if self._pool is None:  # here, not before: a pool does not survive a fork
            self._pool = ThreadPoolExecutor(self._reads.threads, thread_name_prefix="fourfold bench")
        stride = max(1, -(-len(indices) // (PARTS_PER_THREAD * self._reads.threads)))
        parts = [slice(at, at + stride) for at in range(0, len(indices), stride)]
        for num_bytes in self._pool.map(lambda part: self._fill(rows[part], indices[part], pauses[part]), parts):
            self.bytes_read += num_bytes
        return inputs, torch.as_tensor(indices, dtype=torch.int64)

    def _fill(self, rows: np.ndarray, indices: Sequence[int], pauses: Sequence[float]) -> int:
        """Read samples into their rows, and return how many bytes were read for them."""
        num_bytes = 0
        for row, index, pause in zip(rows, indices, pauses, strict=True):
            file, record = divmod(int(index), self.shape.samples_per_file)
            path = self._path_of(file)
            place = _Record(path, record, self.shape, self._reads.direct, self._thread.buffer, self._places)
            try:
                num_bytes += self._read(place, row)
            except OSError as error:
                raise _damaged(path, os_error_text(error), record) from error
            if pause:
                time.sleep(pause)
        return num_bytes


class _Place(NamedTuple):
    """Where the first record of an npy file begins, and how long each is."""

    start: int
    length: int


class _Record(NamedTuple):
    """A record to read. `places`: of the files with several records that have been opened before."""

    path: Path
    record: int
    shape: DataShape
    direct: bool
    buffer: ReadBuffer
    places: dict[Path, _Place]


@contextmanager
def _opened(record: _Record) -> Iterator[int]:
    file = os.open(record.path, os.O_RDONLY | (os.O_DIRECT if record.direct else 0))
    try:
        yield file
    finally:
        os.close(file)


def _read_npy(record: _Record, row: np.ndarray) -> int:
    """Read a record of an npy file, all of it; its tail is not kept. Returns how many bytes were read."""
    with _opened(record) as file:
        if record.direct:
            return _read_npy_directly(file, record, row)
        place, num_bytes = record.places.get(record.path), 0
        if place is None:
            header = os.pread(file, HEADER_BYTES, 0)
            place, num_bytes = _locate(header, record), len(header)
        kept = row[: place.length]
        rest = record.buffer.reserve(place.length - len(kept))[: place.length - len(kept)]
        done = _read_into(file, [kept, rest], place.start + record.record * place.length)
        _check_length(done, place.length, record)
        repeat(row, place.length)
        return num_bytes + done


def _read_npy_directly(file: int, record: _Record, row: np.ndarray) -> int:
    """The same past the page cache: in whole blocks."""
    num_bytes, place = 0, record.places.get(record.path)
    if record.shape.samples_per_file == 1:
        data, num_bytes = read_range(file, 0, os.fstat(file).st_size, record.buffer)
        place = _locate(bytes(data[:HEADER_BYTES]), record)
        body = data[place.start :]
    else:
        if place is None:
            header, num_bytes = read_range(file, 0, HEADER_BYTES, record.buffer)
            place = _locate(bytes(header), record)
        start = place.start + record.record * place.length
        body, num_more = read_range(file, start, start + place.length, record.buffer)
        num_bytes += num_more
    _check_length(len(body), place.length, record)
    keep(body[: place.length], row)
    return num_bytes


def _check_length(done: int, length: int, record: _Record) -> None:
    if done < length:
        raise _damaged(record.path, f"ends after {done} of {length} bytes", record.record)


def _read_into(file: int, parts: Sequence[np.ndarray], offset: int) -> int:
    """Fill the parts one after the other; returns how many bytes were there."""
    done = 0
    for part in parts:
        filled = 0
        while filled < len(part):
            count = os.preadv(file, [part[filled:].data], offset + done)
            if not count:
                return done
            filled, done = filled + count, done + count
    return done


def _locate(header: bytes, record: _Record) -> _Place:
    """What the header of an npy file says; remembered for a file of several records."""
    opened = io.BytesIO(header)
    try:
        head = arrays.parse_npy_head(opened)
    except ValueError as error:
        raise _damaged(record.path, str(error).splitlines()[0], record.record) from error
    _check_array(head.shape, head.dtype, record.shape, record.path)
    if head.by_columns and len(head.shape) > 1:
        raise _damaged(record.path, "columns, not rows, are contiguous", record.record)
    place = _Place(head.start, list(head.shape)[-1])
    if record.shape.samples_per_file > 1:
        record.places[record.path] = place
    return place


class _CountingFile(io.FileIO):
    """A file that counts what is read of it."""

    num_bytes = 0

    def readinto(self, buffer: object, /) -> int:
        count = super().readinto(buffer) or 0  # pyright: ignore[reportArgumentType]
        self.num_bytes += count
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self.num_bytes += len(data)
        return data

    def readall(self) -> bytes:  # `FileIO.read` calls it without a size, and would count twice
        return super().readall() or b""


def _read_npz(record: _Record, row: np.ndarray) -> int:
    """Read a record of an npz file: all of its array, as numpy does."""
    if record.direct:
        size = record.path.stat().st_size
        with _opened(record) as file:
            data, num_bytes = read_range(file, 0, size, record.buffer)
        array = read_npz(io.BytesIO(data), record.path)  # pyright: ignore[reportArgumentType]
    else:
        with _CountingFile(record.path) as counting:
            array = read_npz(counting, record.path)
            num_bytes = counting.num_bytes
    _check_array(array.shape, array.dtype, record.shape, record.path)
    keep(array if array.ndim == 1 else array[record.record], row)
    return num_bytes


def keep(body: np.ndarray, row: np.ndarray) -> None:
    """What is kept of a record: its first bytes; all of it, and again from its beginning, if it is too short."""
    length = min(len(body), len(row))
    row[:length] = body[:length]
    repeat(row, length)


def repeat(row: np.ndarray, length: int) -> None:
    """Fill a row whose first `length` bytes are there with these again and again."""
    while 0 < length < len(row):
        count = min(length, len(row) - length)
        row[length : length + count] = row[:count]
        length += count


READERS: dict[str, Callable[[_Record, np.ndarray], int]] = {"npy": _read_npy, "npz": _read_npz}
