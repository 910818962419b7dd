"""Parquet and Arrow: the rows of tables.

part    what is read of a file at once: a row group of Parquet, a record batch of Arrow
Law: a part is read when a row of it is needed; few of them are held. The wanted columns have one type in all files,
and the order of the first. A stream has no index, so its batches are held: they point into its mapped file, and
a compressed one that does not fit is refused.
"""

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fourfold.feed.formats.arrow_messages import file_batches, stream_batches
from fourfold.feed.formats.positioned import file_size
from fourfold.feed.formats.tables import choose_columns, image_columns, pyarrow, rows_of, type_text
from fourfold.feed.unpacked import Unpacked, check_fits, share_bytes
from fourfold.words.errors import DataError, Problem

MAX_RATIO = 2000  # of zstd and the encodings of Parquet together, for data that are not one value
MAX_ROWS, MOST_ROWS = 2**48, 2**16  # of a row group; of what is read of it at once
TOGETHER_BYTES = 2**20  # of columns that are read at once
WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # of the physical types; not of bits and bytes
MAX_STREAM_BYTES = 2**28  # in memory, of a stream that is compressed


@contextlib.contextmanager
def as_value_error() -> Iterator[None]:
    """Errors of pyarrow as ValueError; they are of several kinds."""
    try:
        yield
    except pyarrow().ArrowException as error:
        raise ValueError(str(error)) from error


class _Parquet:
    """A Parquet file; parts are its row groups."""

    def __init__(self, path: str, size: int, columns: Sequence[str] | None) -> None:
        self._file = pyarrow().parquet.ParquetFile(path, page_checksum_verification=True, memory_map=False)
        self.schema, metadata = self._file.schema_arrow, self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for number, group in enumerate(groups):
            if not 0 <= group.num_rows <= MAX_ROWS or not 0 <= group.total_byte_size <= MAX_RATIO * size + 2**20:
                raise ValueError(f"row group {number} of {group.num_rows} rows and {group.total_byte_size} bytes")
        self.sizes = [group.num_rows for group in groups]
        self.columns = choose_columns(self.schema, columns, path)

    def _chunks(self, number: int) -> dict[str, list[Any]]:
        """By wanted column, what a row group says of it, or of its parts."""
        group, found = self._file.metadata.row_group(number), {name: list[Any]() for name in self.columns}
        lengths = {len(name) for name in self.columns}
        for place in range(group.num_columns):
            chunk = group.column(place)
            path = f"{chunk.path_in_schema}."
            for name in [path[:length] for length in lengths if path[length : length + 1] == "."]:
                if name in found:
                    found[name].append(chunk)
        return found

    def part_bytes(self, number: int) -> int:
        """What a row group has in memory, at least: a page of a few bytes may stand for any number of equal values."""
        return sum(
            max(each.total_uncompressed_size, WIDTHS.get(each.physical_type, 0) * each.num_values)
            for chunks in self._chunks(number).values()
            for each in chunks
        )

    def part(self, number: int) -> Any:
        total, columns = 0, []
        for names, num_bytes in self._together(number):  # of a column, pyarrow holds at most 2 GiB of text at once
            rows = min(MOST_ROWS, max(1, share_bytes() // (4 * max(1, num_bytes))))
            batches = []
            for batch in self._file.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
                total += batch.nbytes
                check_fits(2 * total, f"row group {number}")  # twice: as batches, and as one table
                batches.append(batch)
            table = pyarrow().Table.from_batches(batches, None if batches else self.schema)
            columns += [table.column(name).combine_chunks() for name in names]
        return pyarrow().table(columns, self.columns)

    def _together(self, number: int) -> Iterator[tuple[list[str], int]]:
        """Columns that are read at once, and how long a row of them can be: a call of pyarrow goes over all columns."""
        names, num_bytes = list[str](), 0
        for name, chunks in self._chunks(number).items():
            # A value is no longer than its column, but may stand in every row.
            longest = max((each.total_uncompressed_size for each in chunks), default=0)
            if names and num_bytes + longest > TOGETHER_BYTES:
                yield names, num_bytes
                names, num_bytes = [], 0
            names.append(name)
            num_bytes += longest
        yield names, num_bytes


class _ArrowFile:
    """An Arrow file (Feather 2), mapped; parts are its record batches."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        library = pyarrow()
        mapped = library.memory_map(path).read_buffer()
        self._file = library.ipc.open_file(mapped)
        self.schema = self._file.schema
        self.columns = choose_columns(self.schema, columns, path)
        found = list(file_batches(mapped))
        check_fits(sum(each.num_bytes for each in found if each.is_dictionary), "dictionaries")
        self._batches = [each for each in found if not each.is_dictionary]
        self.sizes = [each.num_rows for each in self._batches]

    def part_bytes(self, number: int) -> int:
        return self._batches[number].num_bytes

    def part(self, number: int) -> Any:
        batch = self._file.get_batch(number)
        return pyarrow().Table.from_batches([batch]).select(self.columns)


class _ArrowStream:
    """An Arrow stream, as `datasets` writes it, mapped: all its batches point into the file."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        library = pyarrow()
        mapped = library.memory_map(path).read_buffer()
        if sum(each.num_bytes for each in stream_batches(mapped)) > MAX_STREAM_BYTES:
            problem = Problem(
                f"{path}: a compressed stream, of more than {MAX_STREAM_BYTES} bytes in memory",
                "an Arrow file, whose batches can be read one by one",
                "pyarrow.feather.write_feather",
            )
            raise DataError(problem, where=path)
        reader = library.ipc.open_stream(mapped)
        self.schema = reader.schema
        self.columns = choose_columns(self.schema, columns, path)
        self._batches = list(reader)
        self.sizes = [batch.num_rows for batch in self._batches]

    def part_bytes(self, number: int) -> int:
        return 0  # in the mapped file, or in memory already

    def part(self, number: int) -> Any:
        return pyarrow().Table.from_batches([self._batches[number]]).select(self.columns)


def _open(path: str, columns: Sequence[str] | None) -> Any:
    """The file by its first bytes. Raises DataError if it is damaged."""
    size = file_size(path)
    try:
        with open(path, "rb") as file:
            start = file.read(6)
        with as_value_error():
            if start[:4] == b"PAR1":
                return _Parquet(path, size, columns)
            return (_ArrowFile if start == b"ARROW1" else _ArrowStream)(path, columns)
    except (ValueError, OSError, EOFError, MemoryError) as error:
        got = f"{path}: {(str(error).splitlines() or [type(error).__name__])[0][:300]}"
        raise DataError(Problem(got, "a Parquet or Arrow file that is whole"), where=path) from error


class TableRows:
    """The rows of Parquet or Arrow files."""

    bytes_read = None  # by pyarrow, or by the kernel through a map

    def __init__(self, name: str, paths: Sequence[str], columns: Sequence[str] | None = None) -> None:
        self.name, self._paths, self._wanted = name, list(paths), columns
        self._start()

    def _start(self) -> None:
        self._files = [_open(path, self._wanted) for path in self._paths]
        types = [{name: type_text(file.schema.field(name).type) for name in file.columns} for file in self._files]
        self.field_names = self._files[0].columns
        for path, file, found in zip(self._paths, self._files, types, strict=True):
            if differ := [name for name in {**types[0], **found} if found.get(name) != types[0].get(name)]:
                need = f"{_summary(types[0], differ)}, as in {self._paths[0]}"
                attempt = "a folder for each, or columns= without them"
                raise DataError(Problem(f"{path}: {_summary(found, differ)}", need, attempt), where=self.name)
            file.columns = self.field_names
        self._images = image_columns(self._files[0].schema)
        self._ends = [list(itertools.accumulate(file.sizes)) for file in self._files]
        self.shard_sizes = [ends[-1] if ends else 0 for ends in self._ends]
        self._parts = Unpacked[Any]()

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_paths": self._paths, "_wanted": self._wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def key(self, file: int, record: int) -> str:
        return f"{self._paths[file]}, row {record}"

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        by_part: dict[int, list[int]] = {}
        for place, record in enumerate(records):
            by_part.setdefault(bisect.bisect_right(self._ends[file], record), []).append(place)
        found: list[Any] = [None] * len(records)
        for number, places in by_part.items():
            start = self._ends[file][number - 1] if number else 0
            with as_value_error():
                table = self._part(file, number).take([records[place] - start for place in places])
                for place, row in zip(places, rows_of(table, self._images), strict=True):
                    found[place] = row
        return found

    def _part(self, file: int, number: int) -> Any:
        def unpack() -> Any:
            table = self._files[file].part(number)
            if table.num_rows != self._files[file].sizes[number]:
                raise ValueError(f"part {number} of {table.num_rows} rows")
            table.validate(full=True)  # offsets of damaged files point anywhere
            return table

        return self._parts.get((file, number), self._files[file].part_bytes(number), unpack)


def _summary(types: Mapping[str, str], names: Sequence[str]) -> str:
    text = ", ".join(f"{name} {types[name]}" if name in types else f"no {name}" for name in names)
    return text if len(text) <= 300 else f"{text[:300]} …"
