"""Parquet and Arrow: the rows of tables; also of data sets that Hugging Face's `datasets` has saved as folders of them.

part     what is read of a file at once: a row group of Parquet, a record batch of Arrow
column   numbers and booleans, text, bytes, lists of these, structs; a Hugging Face Image is an encoded image
message  a head, which is a table of flatbuffers, and a body; a file says in its footer where they are
buffer   a part of a body; of a compressed batch its first 8 bytes say how long it is when it is unpacked, or -1: as is
Law: a part is read when a row of it is needed; few of them are held. The wanted columns have one type in all files,
and the order of the first; each value has the dtype of its column. A null is no value: its record is damaged. Columns
of other types are refused when opened, all at once. A stream has no index, so its batches are held: they point into its
mapped file, and a compressed one that does not fit is refused: how much memory a batch takes is known by its head, and
pyarrow unpacks no more of a buffer than its first 8 bytes say. A row has a bit at least. A folder's files are those
that its `state.json` names, in its order, and they are in the folder; `datasets` is not needed.

Source: Apache Arrow, format/Message.fbs and format/File.fbs; flatbuffers' "internals"; datasets 5.2.0,
Dataset.save_to_disk, which writes rows in their order, without an index of rows.
"""

import bisect
import contextlib
import functools
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fourfold.feed.formats.positioned import file_size, read_json
from fourfold.feed.optional_package import import_optional
from fourfold.feed.pack.schema import EncodedImage
from fourfold.feed.unpacked import Unpacked, check_fits, load_json, share_bytes
from fourfold.words import argument_checks
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem, first_line

# ---- folders of Hugging Face -----------------------------------------------------------------------------------------


STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
MAX_STATE_BYTES = 2**26


def saved_files(folder: Path) -> list[str]:
    """The Arrow files of a saved data set. Raises DataError for a state that is damaged, or names other files."""
    need = "the state of a data set that `datasets` has saved"
    entries = read_json(folder / STATE_FILE, lambda state: state["_data_files"] or None, MAX_STATE_BYTES, need)
    names: list[Any] = [each.get("filename") for each in entries]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            problem = Problem(f"a file named {str(name)[:100]!r}", "a file of the folder")
            raise DataError(problem, where=str(folder / STATE_FILE))
    return [str(folder / name) for name in names]


# ---- columns of tables -----------------------------------------------------------------------------------------------


FILE_FIELDS = {"bytes", "path"}


@functools.cache
def pyarrow() -> Any:
    """The library with its parts. Raises DataError if it is not installed."""
    for part in ("compute", "ipc", "parquet"):
        got, need = "Parquet or Arrow, and no pyarrow", "pyarrow, which reads them"
        import_optional(f"pyarrow.{part}", need, "arrow", got=got)
    return sys.modules["pyarrow"]


def _choose_columns(schema: Any, wanted: Sequence[str] | None, where: str) -> list[str]:
    """The names of the wanted columns. Raises DataError for those that are missing, or of types that cannot be read."""
    problems = argument_checks.unknown_name_problems("column", wanted or (), schema.names)
    names = [name for name in schema.names if wanted is None or name in wanted]
    if len(set(schema.names)) < len(schema.names):
        twice = sorted(name for name, count in Counter(schema.names).items() if count > 1)
        problems.append(Problem(f"several columns named {comma_list(twice)}", "a different name for each"))
    else:
        for name in names:
            if not _is_readable(schema.field(name).type):
                got = f"column {name!r} of {schema.field(name).type}"
                need = "numbers, text, bytes, or lists or structs of them"
                problems.append(Problem(got, need, "columns= without it"))
    if problems:
        raise DataError(problems, where=where)
    return names


def _is_readable(kind: Any) -> bool:
    types = pyarrow().types
    if types.is_dictionary(kind) and types.is_nested(kind.value_type):
        return False
    if _is_list(kind := _plain(kind)):
        return _is_readable(kind.value_type)
    if types.is_struct(kind):
        fields = [kind.field(number).type for number in range(kind.num_fields)]
        return bool(fields) and all(map(_is_readable, fields))
    if types.is_decimal(kind) or types.is_temporal(kind):
        return False
    return (
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or _is_text(kind) or _is_bytes(kind)
    )


def _type_text(kind: Any) -> str:
    """What a type is to a sample: the same text for types that differ in how they are stored, or may be null."""
    if _is_list(kind := _plain(kind)):
        return f"list<{_type_text(kind.value_type)}>"
    if pyarrow().types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return f"struct<{', '.join(f'{field.name} {_type_text(field.type)}' for field in fields)}>"
    return "string" if _is_text(kind) else "binary" if _is_bytes(kind) else str(kind)


def _plain(kind: Any) -> Any:
    """The type of what a dictionary or an extension such as Array2D stores."""
    types = pyarrow().types
    while types.is_dictionary(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if types.is_dictionary(kind) else kind.storage_type
    return kind


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: Any) -> bool:
    return pyarrow().types.is_string(kind) or pyarrow().types.is_large_string(kind)


def _is_bytes(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _image_columns(schema: Any, where: str) -> frozenset[str]:
    """The columns that Hugging Face's `datasets` has written as images. Raises DataError for metadata without end."""
    try:
        features = load_json((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return frozenset(name for name, each in features.items() if each.get("_type") == "Image")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset()  # somebody else's metadata
    except ValueError as error:  # larger than the share
        raise DataError(Problem(f"metadata of `datasets`: {error}", "metadata of columns"), where=where) from error


def _rows_of(table: Any, images: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """The rows of a table. Raises ValueError for nulls and damaged text."""
    columns = {}
    for name in table.column_names:
        values = _column_values(table.column(name).combine_chunks(), name)
        if name in images:  # as the metadata say, which may lie
            values = [EncodedImage(value) if isinstance(value, bytes) else value for value in values]
        columns[name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _column_values(column: Any, name: str) -> list[Any]:
    """The values of a pyarrow array: arrays of no dim for numbers, arrays for lists of them."""
    kind, types, column = column.type, pyarrow().types, _decoded(column)
    if column.null_count:
        raise ValueError(f"{name} is null")
    if types.is_struct(column.type):
        fields = {field.name: column.field(number) for number, field in enumerate(column.type)}
        if set(fields) == FILE_FIELDS:
            # An image or a sound of `datasets`. Its path, which may be a URL, is not read: only what is in the table.
            return _column_values(fields["bytes"], f"{name}.bytes")
        values = {each: _column_values(part, f"{name}.{each}") for each, part in fields.items()}
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    if _is_list(column.type):
        values = [_list_value(column[row].values, name) for row in range(len(column))]
        if isinstance(kind, pyarrow().FixedShapeTensorType):
            order = kind.permutation or range(len(kind.shape))
            values = [value.reshape(kind.shape).transpose(order) for value in values]
        return values
    if _is_text(column.type) or _is_bytes(column.type):
        return column.to_pylist()
    return list(map(np.asarray, column.to_numpy(zero_copy_only=False)))


def _decoded(column: Any) -> Any:
    """What a column of a dictionary or an extension stores, as one array."""
    library = pyarrow()
    column = column.combine_chunks() if isinstance(column, library.ChunkedArray) else column
    while library.types.is_dictionary(column.type) or hasattr(column.type, "storage_type"):
        if library.types.is_dictionary(column.type):
            if not library.types.is_primitive(column.type.value_type):  # one long value may stand in every place
                sizes = library.compute.binary_length(column.dictionary).take(column.indices)
                check_fits(library.compute.sum(sizes).as_py() or 0, "the values of a dictionary")
            column = column.dictionary_decode()
        else:
            column = column.storage
    return column


def _list_value(values: Any, name: str) -> Any:
    """A list of numbers as an array, of several dims if its lists are regular; other lists as lists."""
    values = _decoded(values)
    if values.null_count:
        raise ValueError(f"{name} holds a null")
    if _is_list(values.type):
        parts = [_list_value(values[row].values, name) for row in range(len(values))]
        if parts and all(isinstance(part, np.ndarray) and part.shape == parts[0].shape for part in parts):
            return np.stack(parts)
        return parts
    if pyarrow().types.is_struct(values.type) or _is_text(values.type) or _is_bytes(values.type):
        return _column_values(values, name)
    return np.array(values.to_numpy(zero_copy_only=False))


# ---- heads of messages -----------------------------------------------------------------------------------------------


TRAILER = 10  # the last bytes of a file: the length of its footer, and ARROW1
BLOCK, STRUCT = 24, 16  # bytes of a Block; of a Buffer and of a FieldNode
LAST_EXPERIMENTAL = 3  # version of messages of Arrow 0.17, which says in its metadata that a batch is compressed


class Batch(NamedTuple):
    """A batch of rows, or a dictionary of values. `num_bytes`: in memory, outside of the mapped file."""

    is_dictionary: bool
    num_rows: int
    num_bytes: int


class _Table(NamedTuple):
    """A table of flatbuffers, which pyarrow has verified; a field that is missing is 0."""

    content: memoryview
    at: int

    def place(self, field: int) -> int:
        vtable, slot = self.at - _number(self.content, self.at, 4), 4 + 2 * field
        offset = _number(self.content, vtable + slot, 2) if slot < _number(self.content, vtable, 2) else 0
        return offset and self.at + offset

    def number(self, field: int, size: int) -> int:
        place = self.place(field)
        return place and _number(self.content, place, size)

    def table(self, field: int) -> "_Table":
        place = self.place(field)
        return _Table(self.content, place + _number(self.content, place, 4))

    def structs(self, field: int, size: int) -> list[int]:
        """Where the structs of a vector begin."""
        if not (place := self.place(field)):
            return []
        start = place + _number(self.content, place, 4)
        return [start + 4 + size * index for index in range(_number(self.content, start, 4))]


def _number(content: memoryview, at: int, size: int) -> int:
    return int.from_bytes(content[at : at + size], "little", signed=True)


def _root(content: memoryview) -> _Table:
    return _Table(content, _number(content, 0, 4))


def _stream_batches(mapped: Any) -> Iterator[Batch]:
    """The batches of a stream. Raises ValueError or pyarrow's errors if it is damaged."""
    for message in pyarrow().ipc.MessageReader.open_stream(mapped):
        if message.type != "schema":
            yield _batch(message)


def _file_batches(mapped: Any) -> Iterator[Batch]:
    """The batches of a file whose footer pyarrow has read. Raises ValueError or pyarrow's errors if it is damaged."""
    content = memoryview(mapped)
    length = _number(content, len(content) - TRAILER, 4)
    footer = _root(content[len(content) - TRAILER - length : -TRAILER])
    for field in (2, 3):  # dictionaries, batches
        for block in footer.structs(field, BLOCK):
            start = _number(footer.content, block, 8)
            length = _number(footer.content, block + 8, 4) + _number(footer.content, block + 16, 8)
            if not 0 <= start <= start + length <= len(content):
                raise ValueError(f"a batch of bytes {start} to {start + length} in a file of {len(content)}")
            yield _batch(pyarrow().ipc.read_message(mapped.slice(start, length)))


def _batch(message: Any) -> Batch:
    root, is_dictionary = _root(memoryview(message.metadata)), message.type == "dictionary"
    if not is_dictionary and message.type != "record batch":
        raise ValueError(f"a message of type {message.type}")
    batch = root.table(2).table(1) if is_dictionary else root.table(2)
    num_rows, body = batch.number(0, 8), memoryview(message.body)
    is_packed = batch.place(3) or (root.number(0, 2) <= LAST_EXPERIMENTAL and root.place(4))
    unpacked, mapped = 0, 0
    for place in batch.structs(2, STRUCT):
        start, length = _number(batch.content, place, 8), _number(batch.content, place + 8, 8)
        size = _number(body, start, 8) if is_packed and length and start >= 0 else -1
        unpacked, mapped = unpacked + max(0, size), mapped + (max(0, length) if size < 0 else 0)
    if not is_dictionary:
        lengths = [_number(batch.content, place, 8) for place in batch.structs(1, STRUCT)[:1]]  # of the first column
        if not 0 <= num_rows <= 8 * (unpacked + mapped) or lengths not in ([], [num_rows]):
            raise ValueError(f"a batch of {num_rows} rows, of columns with {unpacked + mapped} bytes")
    return Batch(is_dictionary, num_rows, unpacked)


# ---- rows ------------------------------------------------------------------------------------------------------------


MAX_RATIO = 2000  # of zstd and the encodings of Parquet together, for data that are not one value
MAX_ROWS, MOST_ROWS = 2**48, 2**16  # of a row group; of what is read of it at once
TOGETHER_BYTES = 2**20  # of columns that are read at once
WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # of the physical types; not of bits and bytes
# Of a page, in the file `parquet.thrift`: its head begins with its type and its size when it is unpacked.
DICTIONARY_PAGE, PAGE_HEAD_BYTES, NEXT_I32 = 2, 16, b"\x15"
MAX_STREAM_BYTES = 2**28  # in memory, of a stream that is compressed


@contextlib.contextmanager
def as_value_error() -> Iterator[None]:
    """Errors of pyarrow as ValueError; they are of several kinds."""
    try:
        yield
    except pyarrow().ArrowException as error:
        raise ValueError(str(error)) from error


def _first_numbers(head: bytes) -> Iterator[int]:
    """The i32s with which a head in thrift's compact protocol begins. Raises ValueError after the last one."""
    at = 0
    while head[at : at + 1] == NEXT_I32:
        end = next((end for end in range(at + 1, len(head)) if head[end] < 0x80), None)
        if end is None:
            break
        number = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(head[at + 1 : end + 1]))
        yield (number >> 1) ^ -(number & 1)
        at = end + 1
    raise ValueError("a page whose head is damaged")


class _Parquet:
    """A Parquet file; parts are its row groups."""

    def __init__(self, path: str, size: int, columns: Sequence[str] | None) -> None:
        self._path = path
        self._file = pyarrow().parquet.ParquetFile(path, page_checksum_verification=True, memory_map=False)
        self.schema, metadata = self._file.schema_arrow, self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for number, group in enumerate(groups):
            if not 0 <= group.num_rows <= MAX_ROWS or not 0 <= group.total_byte_size <= MAX_RATIO * size + 2**20:
                raise ValueError(f"row group {number} of {group.num_rows} rows and {group.total_byte_size} bytes")
        self.sizes = [group.num_rows for group in groups]
        self.columns = _choose_columns(self.schema, columns, path)

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
        for chunk in itertools.chain.from_iterable(self._chunks(number).values()):
            # As a page, as its values, and one of these in a batch and in a table.
            check_fits(4 * self._dictionary_bytes(chunk), f"a dictionary in row group {number}")
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

    def _dictionary_bytes(self, chunk: Any) -> int:
        """What the dictionary of a column in a row group unpacks to, as the head of its page says; 0: it has none."""
        start = min(each for each in (chunk.dictionary_page_offset, chunk.data_page_offset) if each)
        with open(self._path, "rb") as file:
            file.seek(start)
            head = file.read(PAGE_HEAD_BYTES)
        kind, num_bytes = itertools.islice(_first_numbers(head), 2)
        return num_bytes if kind == DICTIONARY_PAGE else 0

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
        self.columns = _choose_columns(self.schema, columns, path)
        found = list(_file_batches(mapped))
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
        if sum(each.num_bytes for each in _stream_batches(mapped)) > MAX_STREAM_BYTES:
            problem = Problem(
                f"{path}: a compressed stream, of more than {MAX_STREAM_BYTES} bytes in memory",
                "an Arrow file, whose batches can be read one by one",
                "pyarrow.feather.write_feather",
            )
            raise DataError(problem, where=path)
        reader = library.ipc.open_stream(mapped)
        self.schema = reader.schema
        self.columns = _choose_columns(self.schema, columns, path)
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
        got = f"{path}: {first_line(error)}"
        raise DataError(Problem(got, "a Parquet or Arrow file that is whole"), where=path) from error


class TableRows:
    """The rows of Parquet or Arrow files."""

    noun, files = "row", None

    def __init__(self, name: str, paths: Sequence[str], columns: Sequence[str] | None = None) -> None:
        self.name, self.paths, self._wanted = name, paths, columns
        self._files = [_open(path, columns) for path in paths]
        types = [{name: _type_text(file.schema.field(name).type) for name in file.columns} for file in self._files]
        self.field_names = self._files[0].columns
        for path, file, found in zip(paths, self._files, types, strict=True):
            if differ := [name for name in {**types[0], **found} if found.get(name) != types[0].get(name)]:
                need = f"{_summary(types[0], differ)}, as in {paths[0]}"
                attempt = "a folder for each, or columns= without them"
                raise DataError(Problem(f"{path}: {_summary(found, differ)}", need, attempt), where=self.name)
            file.columns = self.field_names
        self._images = _image_columns(self._files[0].schema, paths[0])
        self._ends = [list(itertools.accumulate(file.sizes)) for file in self._files]
        self.shard_sizes = [ends[-1] if ends else 0 for ends in self._ends]
        self._parts = Unpacked[Any]()

    def __reduce__(self) -> Any:  # to a worker process goes nothing that is open
        return TableRows, (self.name, self.paths, self._wanted)

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        by_part: dict[int, list[int]] = {}
        for place, record in enumerate(records):
            by_part.setdefault(bisect.bisect_right(self._ends[file], record), []).append(place)
        found: list[Any] = [None] * len(records)
        for number, places in by_part.items():
            start = self._ends[file][number - 1] if number else 0
            with as_value_error():
                table = self._part(file, number).take([records[place] - start for place in places])
                for place, row in zip(places, _rows_of(table, self._images), strict=True):
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
    return comma_list(f"{name} {types[name]}" if name in types else f"no {name}" for name in names)
