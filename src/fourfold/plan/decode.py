"""Decoding: JSON and TOML from files that may hold anything; and TOML as it is written.

value  a bool, an int, a float, a text, or a list or tuple of these
Law: input that cannot be decoded raises a DecodeError with a reason of one line; no decoded value is nested deeper than
MAX_DEPTH, so code that walks through it needs no guard against recursion.
Law: `from_toml` reads what is written here as an equal value of the same type; a tuple becomes a list.
"""

import errno
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fourfold.words.errors import Problem

# ---- decoding ------------------------------------------------------------------------------------------------------


MAX_DEPTH = 64  # Fourfold's own files have five levels
CHUNK_BYTES = 2**20
MAX_SMALL_BYTES = 2**20  # for plans, settings of a run, error reports of a rank: files of a few KiB
MAX_TOML_CHARS = 2**16
# tomllib needs memory quadratic in the number of parts of a dotted key, which is one line: 100,000 parts took 24 GiB.
MAX_LINE_LENGTH = 1000
TOML_PLACE = re.compile(r" \(at line (\d+), column \d+\)$")  # in an error of tomllib

T = TypeVar("T")


class DecodeError(ValueError):
    """Input that is not the JSON or TOML it should be."""


def from_json(text: bytes, kind: type[T] | Any = Any) -> T | Any:
    """Decode JSON into a value of type `kind`. Raises DecodeError."""
    try:
        value = msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise DecodeError("nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise DecodeError(_first_line(error)) from None
    # With few brackets the value cannot be deep: lines of a log skip the walk.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and is_too_deep(value):
        raise DecodeError("nested too deeply")
    return value


def from_toml(text: str) -> dict[str, Any]:
    """Decode TOML into a table. Raises DecodeError."""
    if len(text) > MAX_TOML_CHARS:
        raise DecodeError(f"more than {MAX_TOML_CHARS} characters")
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_LENGTH:
            raise DecodeError(f"line {number} has more than {MAX_LINE_LENGTH} characters")
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))  # some editors write a byte order mark
    except RecursionError:
        raise DecodeError("nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        reason = _first_line(error)
        place = TOML_PLACE.search(reason)
        raise DecodeError(f"line {place[1]}: {reason[: place.start()]}" if place else reason) from None
    if is_too_deep(table):
        raise DecodeError("nested too deeply")
    return table


def read_bounded(path: Path, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Read a file that should be small. Raises OSError, and DecodeError if it has more than `max_bytes` bytes."""
    check_not_pipe(path)
    text = bytearray()
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):  # of one read, memory for all that it may return would be taken
            text += part
            if len(text) > max_bytes:
                raise DecodeError(f"more than {max_bytes} bytes")
    return bytes(text)


def check_not_pipe(path: Path) -> None:
    """Raise OSError for a pipe: opening it would block until another process opens its other end."""
    if path.is_fifo():
        raise OSError(errno.EINVAL, "is a pipe")


def read_toml(path: Path) -> dict[str, Any]:
    """Read the table in a TOML file. Raises OSError and DecodeError."""
    try:
        return from_toml(read_bounded(path).decode())
    except UnicodeDecodeError:
        raise DecodeError("not UTF-8 text") from None


def is_too_deep(value: Any) -> bool:
    """Whether lists and dicts are nested deeper than MAX_DEPTH. Goes level by level, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inner:
            return False
        level = list(itertools.chain.from_iterable(inner))
    return True


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---- toml writer ---------------------------------------------------------------------------------------------------

MAX_PLAIN_TEXT = 200  # characters on one line; `decode.MAX_LINE_LENGTH` bounds a line, in which each may take ten
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def format_value(value: Any) -> str:
    """A value as TOML. Raises ValueError for what TOML cannot hold: None, an object, half of a surrogate pair."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(float(value))  # inf, nan and 1e-05 are TOML
    if isinstance(value, str):
        return _format_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    raise ValueError(f"a {type(value).__name__}")


def version_problem(version: object, needed: int) -> Problem:
    """The problem of a file that has no version, which is None, or another one than is read."""
    if version is None:
        return Problem("no version", f"version = {needed}", f"add a line version = {needed}")
    return Problem(f"version = {version!r}", f"version = {needed}", "what this version of Fourfold has written")


def format_pair(key: str, value: Any) -> str:
    """`key = value`. Raises ValueError as `format_value` does."""
    return f"{key if BARE_KEY.fullmatch(key) else _format_text(key)} = {format_value(value)}"


def format_table(values: Mapping[str, Any]) -> Sequence[str]:
    """A line for each pair."""
    return [format_pair(key, value) for key, value in values.items()]


def _format_text(text: str) -> str:
    """A basic string; a long text goes on in further lines, which TOML joins."""
    if len(text) <= MAX_PLAIN_TEXT:
        return f'"{_escape(text)}"'
    chunks = [text[start : start + MAX_PLAIN_TEXT] for start in range(0, len(text), MAX_PLAIN_TEXT)]
    # After a backslash at the end of a line, TOML drops the white space that follows.
    lines = [re.sub("^ ", r"\\u0020", _escape(chunk)) for chunk in chunks]
    return '"""\\\n' + "\\\n".join(lines) + '"""'


def _escape(text: str) -> str:
    return "".join(map(_escape_character, text))


def _escape_character(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:  # what Python makes of a file name that is not UTF-8
        raise ValueError(f"the character {character!a}")
    # NEL and the line separators are legal in TOML, but readers that split lines see an end of line.
    is_control = code < 0x20 or 0x7F <= code < 0xA0 or code in (0x2028, 0x2029)
    return ESCAPES.get(character) or (f"\\u{code:04x}" if is_control else character)
