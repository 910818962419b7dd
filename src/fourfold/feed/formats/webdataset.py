"""WebDataset: samples in tar archives, read by position.

block   512 bytes of an archive: a header, or a part of a content, which is padded to whole blocks
member  a file in an archive: its name, and where its content is
sample  members of one archive that follow each other and have one key: the path up to the first dot of its last name
field   what follows that dot, in lower case, such as `jpg`: it says how the content is read
Law: what `webdataset` would group to a sample is one. Nothing is unpickled: such fields are refused when opened. A
header is believed only if its checksum is right, and a size only if the archive has room for it. A link in a sample,
and what follows the end of an archive, are refused: `webdataset` leaves them out.

Source: webdataset 1.0.2, tariterators.py and autodecode.py; POSIX.1-2001, pax, "ustar interchange format"; GNU tar's
manual, "Basic Tar Format" (long names, base-256).
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fourfold.feed.formats.arrays import parse_npy
from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.formats.source import parse_json
from fourfold.feed.pack.schema import EncodedImage
from fourfold.words.errors import DataError, Problem

# ---- members of an archive -------------------------------------------------------------------------------------------


BLOCK = 512
MAX_EXTENSION_BYTES = 2**20  # a long name, or a pax header: far more than a path may have
MAX_SIZE_DIGITS = 20
TAIL_BYTES = 2**20  # read at once, of the zeros at the end
LONG_NAME, PAX, GLOBAL_PAX = b"L", b"xX", b"g"  # global: for all members
EXTENSIONS = LONG_NAME + PAX + GLOBAL_PAX + b"K"  # and long names of links
REGULAR, FOLDER, LINKS_AND_DEVICES = b"0\0" + b"7", b"5", b"12346"
WITHOUT_CONTENT = FOLDER + LINKS_AND_DEVICES
EMPTY, GZIP = bytes(BLOCK), b"\x1f\x8b"


class _Member(NamedTuple):
    """A file in an archive, or a link or device. `header`: where its first header begins."""

    name: str
    header: int
    start: int
    size: int
    kind: bytes


class _Header(NamedTuple):
    name: str
    size: int
    kind: bytes


def _members(files: PositionedFiles, file: int, at: int = 0) -> Iterator[_Member]:
    """The members of an archive, from a header on. Raises DataError for damage, and if more follows its end."""
    path, end, number = files.paths[file], files.sizes[file], 0
    first, extended = at, dict[str, str]()
    try:
        while (block := _block(files, file, at)) != EMPTY:
            header = _extend(_parse_header(block), extended)
            start = at + BLOCK
            at = start
            if header.kind not in WITHOUT_CONTENT:
                at += -(-header.size // BLOCK) * BLOCK
            if at > end:
                raise ValueError(f"{header.name} ends at byte {at} of {end}")
            if header.kind in EXTENSIONS:
                extended |= _extension(header, files, file, start)
                continue
            if header.kind not in WITHOUT_CONTENT + REGULAR:
                raise ValueError(f"{header.name} of type {header.kind.decode('latin-1')!r}, such as a sparse file")
            if header.kind != FOLDER and not (header.kind in REGULAR and header.name.endswith("/")):
                yield _Member(header.name, first, start, header.size, header.kind)
            extended, first, number = {}, at, number + 1
    except ValueError as error:
        need = "a tar archive that is whole, with the zeros at its end, and not compressed"
        attempt = "gunzip it first" if files.read(file, 0, min(2, end)) == GZIP else "the file from its origin"
        raise DataError(Problem(f"{path}, member {number}: {error}", need, attempt), where=path) from error
    for start in range(at, end, TAIL_BYTES):
        if files.read(file, start, min(TAIL_BYTES, end - start)).strip(b"\0"):
            got = f"{path}: more behind the end of the archive, at byte {at}"
            raise DataError(Problem(got, "one archive in a file", "tar --concatenate, not cat"), where=path)


def _block(files: PositionedFiles, file: int, at: int) -> bytes:
    if at + BLOCK > files.sizes[file]:
        raise ValueError(f"the file ends at byte {files.sizes[file]}, where a header or zeros must be")
    return files.read(file, at, BLOCK)


def _extend(header: _Header, extended: Mapping[str, str]) -> _Header:
    """The header of a file, with what the extensions before it say."""
    if header.kind in EXTENSIONS:
        return header
    size = extended.get("size", str(header.size))
    if not size.isascii() or not size.isdigit() or len(size) > MAX_SIZE_DIGITS:
        raise ValueError(f"a size of {size[:40]!r}")
    return header._replace(name=extended.get("path", header.name), size=int(size))


def _parse_header(block: bytes) -> _Header:
    stored = _number(block[148:156])
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if stored != total:
        raise ValueError(f"a header whose checksum is {total}, not {stored}")
    name = _header_text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_header_text(block[345:500])}/{name}"
    return _Header(name, _number(block[124:136]), block[156:157])


def _header_text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: base 256, for what has no room as octal digits
        if field[0] & 0x7F:
            raise ValueError("a negative number")
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits.isdigit():
        raise ValueError(f"{field!r}, where an octal number must be")
    return int(digits, 8)


def _extension(header: _Header, files: PositionedFiles, file: int, start: int) -> dict[str, str]:
    """What a header before that of a file says: its path and its size."""
    if header.kind not in LONG_NAME + PAX + GLOBAL_PAX:
        return {}
    if header.size > MAX_EXTENSION_BYTES:
        raise ValueError(f"a name of {header.size} bytes")
    content = files.read(file, start, header.size)
    if header.kind == LONG_NAME:
        return {"path": _header_text(content)}
    records = _pax_records(content)
    if records and header.kind == GLOBAL_PAX:
        raise ValueError(f"a {', a '.join(records)} for all members")
    return records


def _pax_records(content: bytes) -> dict[str, str]:
    found, at = dict[str, str](), 0
    while at < len(content):
        digits, space, _ = content[at : at + MAX_SIZE_DIGITS].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = content[at + len(digits) + 1 : at + length]
        if not length or at + length > len(content) or not record.endswith(b"\n"):
            raise ValueError("a pax header that cannot be read")
        key, _, value = record[:-1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += length
    if any(key.startswith("GNU.sparse.") for key in found):
        raise ValueError("a sparse file")
    return {key: found[key] for key in ("path", "size") if key in found}


# ---- samples ---------------------------------------------------------------------------------------------------------


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

    noun = "sample"

    def __init__(self, name: str, paths: Sequence[str], columns: Sequence[str] | None = None) -> None:
        self.name, self._columns = name, None if columns is None else frozenset(columns)
        self.paths, self.files = paths, PositionedFiles(paths)
        self._fields: dict[str, int] = {}
        self._archives = [_Archive() for _ in paths]
        for file in range(len(paths)):
            self._index(file)
        self._names = self.field_names = list(self._fields)
        self.shard_sizes = [len(archive.first) - 1 for archive in self._archives]

    def key(self, file: int, record: int) -> str:
        try:
            first = next(islice(_members(self.files, file, self._archives[file].headers[record]), 1))
        except (DataError, OSError):  # the archive is not what it was when it was opened
            return f"{self.paths[file]}, sample {record}"
        return f"{self.paths[file]}, sample {(split_name(first.name) or [first.name])[0]}"

    def read(self, file: int, records: Sequence[int]) -> Iterable[dict[str, Any]]:
        return (self._read(file, record) for record in records)

    def _read(self, file: int, record: int) -> dict[str, Any]:
        archive, sample = self._archives[file], dict[str, Any]()
        for member in range(*archive.first[record : record + 2]):
            field = self._names[archive.fields[member]]
            if self._is_wanted(field):
                content = self.files.read(file, archive.starts[member], archive.sizes[member])
                decode = DECODERS.get(field.rpartition(".")[2], bytes)
                try:
                    sample[field] = decode(content)
                except (ValueError, OverflowError, RecursionError) as error:
                    raise ValueError(f"{field}: {error}") from error
        return sample

    def _index(self, file: int) -> None:
        archive, key, seen = self._archives[file], None, set[str]()
        for member in _members(self.files, file):
            parts = split_name(member.name)
            if META.match(member.name) or parts is None:
                continue
            if parts[0] != key:
                key = parts[0]
                seen.clear()
                archive.first.append(len(archive.starts))
                archive.headers.append(member.header)
            field = parts[1].lower()
            if member.kind in LINKS_AND_DEVICES and self._is_wanted(field):
                attempt = "tar --dereference --hard-dereference"
                raise DataError(
                    Problem(f"{member.name}: a link or a device", "a file", attempt), where=self.paths[file]
                )
            if field in seen:
                problem = Problem(f"{member.name} twice in one sample", "each field once")
                raise DataError(problem, where=self.paths[file])
            seen.add(field)
            archive.starts.append(member.start)
            archive.sizes.append(member.size)
            archive.fields.append(self._number_of(field, member, file))
        archive.first.append(len(archive.starts))

    def _is_wanted(self, field: str) -> bool:
        return self._columns is None or field in self._columns

    def _number_of(self, field: str, member: _Member, file: int) -> int:
        if field not in self._fields:
            path = self.paths[file]
            if self._is_wanted(field) and field.rpartition(".")[2] in PICKLES:
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
