"""Files: the data of an emulated training, generated once and read again.

record    bytes that do not compress, their number first; their length is a function of (seed, record)
data set  files of records in one folder, and `data.json`, which says what they are; it is written last
Law: a folder holds the data set that its name says, or is completed to it; a file is written aside, and then renamed.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fourfold.environment.temporary_folder import temporary_folder
from fourfold.words.errors import DataError, Problem, closest_match, os_error_text
from fourfold.words.units import format_bytes

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
        write_durably(description, lambda file: file.write(json.dumps(expected, indent=1).encode()))
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
        fill_record(row, first + index, block)
    path = shape.path_of(folder, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    array = records[0] if shape.samples_per_file == 1 else records
    write_durably(path, lambda opened: WRITERS[shape.format](opened, array))


def fill_record(row: np.ndarray, record: int, block: np.ndarray) -> None:
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


def write_durably(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file aside, fsync it, and rename it."""
    with temporary_folder(path.parent) as folder:  # another run may write it too
        aside = folder / path.name
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def read_npz(file: io.IOBase, path: Path) -> np.ndarray:
    """The records of an npz file. Raises DataError."""
    try:
        with np.load(file, allow_pickle=False) as arrays:  # pyright: ignore[reportArgumentType]
            return arrays[NPZ_KEY]
    except Exception as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, reason: str, record: int | None = None) -> DataError:
    """The error of a file that cannot be read."""
    place = str(path) if record is None else f"{path}, record {record}"
    return DataError(Problem(f"{place}: {reason}", "the file as it was generated", "deleting its folder"), where="data")


def check_array(array_shape: Sequence[int], dtype: np.dtype, shape: DataShape, path: Path) -> None:
    """Raise DataError unless a file's array is what the data set has in a file."""
    is_right = dtype == np.uint8 and (
        len(array_shape) == 1 if shape.samples_per_file == 1 else tuple(array_shape)[:1] == (shape.samples_per_file,)
    )
    if not is_right or len(array_shape) > 2:
        got = f"an array of {dtype} {list(array_shape)}"
        raise damaged(path, got)
