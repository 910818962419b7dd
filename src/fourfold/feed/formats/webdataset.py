"""WebDataset: samples in tar archives, read by position.

sample  members of one archive that follow each other and have one key: the path up to the first dot of its last name
field   what follows that dot, in lower case, such as `jpg`: it says how the content is read
Law: what `webdataset` would group to a sample is one. Nothing is unpickled: such fields are refused when opened.

Source: webdataset 1.0.2, tariterators.py and autodecode.py.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from fourfold.feed.files.numpy_files import parse_npy
from fourfold.feed.formats.plain_values import parse_json
from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.formats.tar_index import Member, members
from fourfold.feed.pack.schema import EncodedImage
from fourfold.words.errors import DataError, Problem

META = re.compile(r"__[^/]*__($|/)")
PICKLES = frozenset({"pyd", "pickle", "pkl", "pth", "pt"})
MAX_FIELDS = 1000


def _text(content: bytes) -> str:
    return content.decode("utf-8-sig")  # without the byte-order mark that some editors write


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif"), EncodedImage),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), lambda content: np.array(int(_text(content)), np.int64)),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), parse_json),
    "npy": parse_npy,
}


class TarSamples:
    """The samples of tar archives. A field without a known ending is bytes."""

    def __init__(self, name: str, paths: Sequence[str], columns: Sequence[str] | None = None) -> None:
        self.name, self._columns = name, None if columns is None else frozenset(columns)
        self._files = PositionedFiles(paths)
        self._fields: dict[str, int] = {}
        self._archives = [_Archive() for _ in paths]
        for file in range(len(paths)):
            self._index(file)
        self._names = self.field_names = list(self._fields)
        self.shard_sizes = [len(archive.first) - 1 for archive in self._archives]

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def key(self, file: int, record: int) -> str:
        try:
            first = next(islice(members(self._files, file, self._archives[file].headers[record]), 1))
        except (DataError, OSError):  # the archive is not what it was when it was opened
            return f"{self._files.paths[file]}, sample {record}"
        return f"{self._files.paths[file]}, sample {(split_name(first.name) or [first.name])[0]}"

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        return [self._read(file, record) for record in records]

    def _read(self, file: int, record: int) -> dict[str, Any]:
        archive, sample = self._archives[file], dict[str, Any]()
        for member in range(*archive.first[record : record + 2]):
            field = self._names[archive.fields[member]]
            if self._columns is None or field in self._columns:
                content = self._files.read(file, archive.starts[member], archive.sizes[member])
                decode = DECODERS.get(field.rpartition(".")[2], bytes)
                try:
                    sample[field] = decode(content)
                except (ValueError, OverflowError, RecursionError) as error:
                    raise ValueError(f"{field}: {error}") from error
        return sample

    def _index(self, file: int) -> None:
        archive, key, seen = self._archives[file], None, set[str]()
        for member in members(self._files, file):
            parts = split_name(member.name)
            if META.match(member.name) or parts is None:
                continue
            if parts[0] != key:
                key = parts[0]
                seen.clear()
                archive.first.append(len(archive.starts))
                archive.headers.append(member.header)
            field = parts[1].lower()
            if field in seen:
                problem = Problem(f"{member.name} twice in one sample", "each field once")
                raise DataError(problem, where=self._files.paths[file])
            seen.add(field)
            archive.add(member, self._number_of(field, member, file))
        archive.first.append(len(archive.starts))

    def _number_of(self, field: str, member: Member, file: int) -> int:
        if field not in self._fields:
            path = self._files.paths[file]
            wanted = self._columns is None or field in self._columns
            if wanted and field.rpartition(".")[2] in PICKLES:
                attempt = "columns= without it, or the arrays as .npy"
                raise DataError(Problem(f"{member.name}: a pickle, which is never read", attempt=attempt), where=path)
            if len(self._fields) == MAX_FIELDS:
                got = f"{member.name}: more than {MAX_FIELDS} fields"
                raise DataError(Problem(got, "files named KEY.FIELD", "names with no other dots"), where=path)
            self._fields[field] = len(self._fields)
        return self._fields[field]


def split_name(name: str) -> tuple[str, str] | None:
    """The key and the field of a member; None for one that is no part of a sample.

    It is `webdataset`'s `^((?:.*/|)[^.]+)[.]([^/]*)$`, whose time is quadratic in the length of the name.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, field = base.partition(".")
    has_key = stem or (slash and "." not in folder.rpartition("/")[2])  # the key of a/.b is a/
    return (f"{folder}{slash}{stem}", field) if dot and has_key else None


class _Archive:
    """Where the members of an archive are; of each sample its first member and header."""

    def __init__(self) -> None:
        self.starts, self.sizes, self.fields = array("Q"), array("Q"), array("H")
        self.first, self.headers = array("Q"), array("Q")

    def add(self, member: Member, field: int) -> None:
        self.starts.append(member.start)
        self.sizes.append(member.size)
        self.fields.append(field)
