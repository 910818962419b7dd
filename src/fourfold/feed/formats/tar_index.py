"""Tar archives: where their members are, read header by header.

member   a regular file in an archive: its name, and where its content is
block    512 bytes: a header, or a part of a content, which is padded to whole blocks
Law: a header is believed only if its checksum is right, and a size only if the archive has room for it.

Source: POSIX.1-2001, pax, "ustar interchange format"; GNU tar's manual, "Basic Tar Format" (long names, base-256).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.words.errors import DataError, Problem

BLOCK = 512
MAX_EXTENSION_BYTES = 2**20  # a long name, or a pax header: far more than a path may have
MAX_SIZE_DIGITS = 20
LONG_NAME, PAX = b"L", b"x"
EXTENSIONS = b"LKxgX"  # and long names of links, and what holds for all members
REGULAR, WITHOUT_CONTENT = b"0\0" + b"7", b"123456"  # links, devices, folders
EMPTY, GZIP = bytes(BLOCK), b"\x1f\x8b"


class Member(NamedTuple):
    """A regular file in an archive. `header`: where its first header begins."""

    name: str
    header: int
    start: int
    size: int


class _Header(NamedTuple):
    name: str
    size: int
    kind: bytes


def members(files: PositionedFiles, file: int, at: int = 0) -> Iterator[Member]:
    """The regular files of an archive, from a header on. Raises DataError for a header that is damaged."""
    path, end, number = files.paths[file], files.sizes[file], 0
    first, extended = at, dict[str, str]()
    try:
        while (block := files.read(file, at, BLOCK)) != EMPTY:
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
            if header.kind in REGULAR and not header.name.endswith("/"):
                yield Member(header.name, first, start, header.size)
            elif header.kind not in WITHOUT_CONTENT + REGULAR:
                raise ValueError(f"{header.name} of type {header.kind.decode('latin-1')!r}, such as a sparse file")
            extended, first, number = {}, at, number + 1
    except ValueError as error:
        need = "a tar archive that is whole, with the zeros at its end, and not compressed"
        attempt = "gunzip it first" if files.read(file, 0, min(2, end)) == GZIP else "the file from its origin"
        raise DataError(Problem(f"{path}, member {number}: {error}", need, attempt), where=path) from error


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
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    return _Header(name, _number(block[124:136]), block[156:157])


def _text(field: bytes) -> str:
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
    if header.kind not in (LONG_NAME, PAX):
        return {}
    if header.size > MAX_EXTENSION_BYTES:
        raise ValueError(f"a name of {header.size} bytes")
    content = files.read(file, start, header.size)
    return {"path": _text(content)} if header.kind == LONG_NAME else _pax_records(content)


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
