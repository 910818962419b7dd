"""Lines: text, JSON lines and CSV, a sample per line.

record  a line; of a CSV file a row, which may hold line breaks in quotes
index   where each record begins in its file, in memory: 8 bytes each
Law: sample i is the i-th record of the files in their order; blank lines of JSON lines and CSV are no records.
"""

import codecs
import csv
import functools
import io
import math
import os
import re
import shlex
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from fourfold.feed.formats.positioned import PositionedFiles, file_size
from fourfold.feed.formats.source import stackable
from fourfold.feed.unpacked import load_json, share_bytes
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem

INT = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
MARK = codecs.BOM_UTF8  # which editors and spreadsheets write before the first line
OTHER_MARKS = {  # that of UTF-32 first: it begins as that of UTF-16
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
}
COMPRESSED = {  # how a file of these kinds begins, and what unpacks it
    b"\x1f\x8b": "gzip -dc",
    b"\x28\xb5\x2f\xfd": "zstd -dc",
    b"\xfd7zX": "xz -dc",
    **{b"BZh%d1AY&SY" % level: "bzip2 -dc" for level in range(1, 10)},  # not its first three alone: they are text
    b"PK\x03\x04": "unzip -p",
}
csv.field_size_limit(max(2**26, csv.field_size_limit()))  # of this process. Python's own, 128 KiB, is less than a text
FLOAT = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|nan|[+-]?inf", re.ASCII)
Parse = Callable[[str], Any]
Column = Callable[[str], Any]


class LineRecords:
    """The records of files. `offsets`: of each file, where its records begin, and at last where they end."""

    noun = "record"

    def __init__(self, name: str, paths: Sequence[str], offsets: Sequence["array[int]"], parse: Parse) -> None:
        self.name, self.paths, self.files = name, paths, PositionedFiles(paths)
        self._offsets, self._parse = offsets, parse
        self.shard_sizes = [len(each) - 1 for each in offsets]

    def read(self, file: int, records: Sequence[int]) -> Iterable[dict[str, Any]]:
        return (self._read(file, record) for record in records)

    def _read(self, file: int, record: int) -> dict[str, Any]:
        start, stop = self._offsets[file][record : record + 2]
        # Files that were joined have marks in between.
        return self._parse(self.files.read(file, start, stop - start).decode().removeprefix("\ufeff"))


def open_text(name: str, paths: Sequence[str]) -> LineRecords:
    """Samples {"text": line}."""
    return LineRecords(name, paths, _index(paths, skip_blank=False), _parse_text)


def _parse_text(line: str) -> dict[str, str]:
    return {"text": line.rstrip("\r\n")}


def open_jsonl(name: str, paths: Sequence[str]) -> LineRecords:
    """Samples: the object of each line."""
    return LineRecords(name, paths, _index(paths, skip_blank=True), _parse_object)


def _parse_object(line: str) -> dict[str, Any]:
    value = load_json(line)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return stackable(value)


def _index(paths: Sequence[str], *, skip_blank: bool) -> "list[array[int]]":
    offsets = []
    for path in paths:
        starts = array("Q")
        file_size(path)
        with open(path, "rb") as file:
            at = _skip_mark(file, path)
            for line in _lines(file, path):
                # A blank line is read with the record before it, which JSON and CSV allow.
                if not (skip_blank and line.isspace()):
                    starts.append(at)
                at += len(line)
        starts.append(at)
        offsets.append(starts)
    return offsets


def _skip_mark(file: BinaryIO, path: str) -> int:
    """Where the text of a file begins: behind a byte-order mark.

    Raises DataError for a mark of UTF-16 or UTF-32, and for a compressed file.
    """
    start = file.read(10)
    name = os.path.basename(path)
    for magic, unpack in COMPRESSED.items():
        if start.startswith(magic):
            problem = Problem(f"compressed data in {name}", "plain text", f"{unpack} {shlex.quote(name)} > text")
            raise DataError(problem, where=path)
    for mark, encoding in OTHER_MARKS.items():
        if start.startswith(mark):
            attempt = f"iconv -f {encoding} -t UTF-8 {shlex.quote(name)}"
            raise DataError(Problem(f"text in {encoding}", "text in UTF-8", attempt), where=path)
    return file.seek(len(MARK) if start.startswith(MARK) else 0)


def _lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The lines of a file. Raises DataError for one that does not fit into memory, as a file with holes may have."""
    most = min(share_bytes(), sys.maxsize - 1)
    for line in iter(functools.partial(file.readline, most + 1), b""):
        if len(line) > most:
            got = f"a line of more than {most} bytes, the memory of each rank of this host"
            raise DataError(Problem(got, "lines that fit"), where=path)
        yield line


def open_csv(name: str, paths: Sequence[str]) -> LineRecords:
    """Samples: dicts of the columns, which the first row names. A column of whole numbers is int, of numbers float.

    All rows are read once, for where they begin and what the columns are; an empty cell makes its column text. Raises
    DataError for a row of another number of columns, and for files with other columns.
    """
    offsets, header, columns = [], None, list[Column]()
    for path in paths:
        file_size(path)
        with open(path, "rb") as file:
            reader = _CsvReader(file, path)
            names = reader.header()
            if header is not None and names != header:
                raise DataError(_difference(names, header), where=path)
            header, columns = names, columns or [int] * len(names)
            offsets.append(reader.index(columns))
    assert header is not None
    parse = functools.partial(_parse_row, header, columns, _delimiter(paths[0]))
    return LineRecords(name, paths, offsets, parse)


def _difference(names: Sequence[str], header: Sequence[str]) -> Problem:
    """The problem of a file with other columns than the first, by the first one that differs."""
    if len(names) != len(header):
        return Problem(f"{len(names)} columns", f"{len(header)}, as in the first file")
    number = next(number for number, name in enumerate(names) if name != header[number])
    return Problem(f"column {number} named {names[number]!r}", f"{header[number]!r}, as in the first file")


def _delimiter(name: str) -> str:
    return "\t" if name.lower().endswith(".tsv") else ","


def _parse_row(header: Sequence[str], columns: Sequence[Column], delimiter: str, record: str) -> dict[str, Any]:
    row = next(csv.reader(io.StringIO(record, newline=""), delimiter=delimiter))
    return {name: column(cell) for name, column, cell in zip(header, columns, row, strict=True)}


class _CsvReader:
    """The rows of a CSV file with the bytes where they begin."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path, self._at = file, path, _skip_mark(file, path)
        self._rows = csv.reader(self._lines(), delimiter=_delimiter(path), strict=True)

    def _lines(self) -> Iterator[str]:
        for number, line in enumerate(_lines(self._file, self._path), 1):
            self._at += len(line)
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise DataError(Problem(f"line {number}: {error}", "text in UTF-8"), where=self._path) from error

    def header(self) -> list[str]:
        names = next(self._read(), None)
        if not names or len(set(names)) < len(names) or not all(names):
            raise DataError(_header_problem(names or [], self._path), where=self._path)
        return names

    def index(self, columns: list[Column]) -> "array[int]":
        """Where the rows begin. `columns`, what cells are converted by, become what these rows allow."""
        starts, count = array("Q", [self._at]), len(columns)
        for row in self._read():
            if not row:  # a blank line: the next row begins after it
                starts[-1] = self._at
                continue
            if len(row) != count:
                problem = Problem(f"row {len(starts) - 1} with {len(row)} columns", f"{count}, as the first row has")
                raise DataError(problem, where=self._path)
            for place, cell in enumerate(row):
                columns[place] = _widened(columns[place], cell)
            starts.append(self._at)
        return starts

    def _read(self) -> Iterator[list[str]]:
        try:
            yield from self._rows
        except csv.Error as error:
            got = f"line {self._rows.line_num}: {error}"
            raise DataError(Problem(got, "rows of CSV"), where=self._path) from error


def _header_problem(cells: list[str], path: str) -> Problem:
    """The problem of a first row that does not name the columns."""
    need = "a first row with a different name for each column"
    if not cells:
        return Problem("no rows", need)
    if any(_widened(int, cell) is not str for cell in cells):
        file = shlex.quote(os.path.basename(path))
        names = f"$(seq -s '{_delimiter(path)}' {len(cells)})"
        got = "a first row of values: the file seems to have no header row"
        return Problem(got, need, f'sed -i "1i {names}" {file}')
    twice = comma_list(sorted(cell for cell, count in Counter(cells).items() if count > 1 and cell))
    return Problem(f"a first row with {f'several columns named {twice}' if twice else 'a column without a name'}", need)


def _long_int(cell: str) -> int:
    """What cells of a column are converted by that has whole numbers which no float is."""
    return int(cell)


def _widened(column: Column, cell: str) -> Column:
    """What a column's cells are converted by without loss, with this one: 007 and a number of 20 digits are text."""
    if column is str:
        return str
    if not INT.fullmatch(cell):
        is_float = FLOAT.fullmatch(cell) and (math.isfinite(float(cell)) or cell[-1] in "nf")  # 1e400 is text
        return float if is_float and column is not _long_int else str
    number = int(cell[:30])
    if not -(2**63) <= number < 2**63:
        return str
    is_exact = float(number) == number
    if column is float:
        return float if is_exact else str
    return column if is_exact else _long_int
