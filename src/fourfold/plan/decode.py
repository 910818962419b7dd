"""Decode: JSON and TOML from files, which may hold anything.

Law: what cannot be decoded raises a DecodeError with its reason in one line; no decoded value is nested deeper than
MAX_DEPTH, so that code which walks through it needs no guard of its own.
"""

import errno
import itertools
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

MAX_DEPTH = 64  # our own files have five levels
MAX_SMALL_BYTES = 2**20  # a plan, the settings of a run, a rank's error: files of a few KiB
MAX_TOML_BYTES = 2**16
# tomllib needs memory quadratic in the parts of a dotted key, which is on one line: 100,000 parts took 24 GiB.
MAX_LINE_LENGTH = 1000

T = TypeVar("T")


class DecodeError(ValueError):
    """A text that is not the JSON or TOML it should be."""


def from_json(text: bytes, kind: type[T] | Any = Any) -> T | Any:
    """The value of a JSON text, of the type `kind`. Raises DecodeError."""
    try:
        value = msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise DecodeError("nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError is the first, too
        raise DecodeError(_first_line(error)) from None
    # Few brackets cannot be deep: lines of a log are not walked through.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and is_too_deep(value):
        raise DecodeError("nested too deeply")
    return value


def from_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises DecodeError."""
    if len(text) > MAX_TOML_BYTES or any(len(line) > MAX_LINE_LENGTH for line in text.splitlines()):
        raise DecodeError(f"more than {MAX_TOML_BYTES} characters, or more than {MAX_LINE_LENGTH} in a line")
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))  # some editors begin a file so
    except RecursionError:
        raise DecodeError("nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise DecodeError(_first_line(error)) from None
    if is_too_deep(table):
        raise DecodeError("nested too deeply")
    return table


def read_bounded(path: Path, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """A file that should be small. Raises OSError, and DecodeError where it is larger than `most` bytes."""
    check_not_pipe(path)
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise DecodeError(f"more than {max_bytes} bytes")
    return text


def check_not_pipe(path: Path) -> None:
    """Raise OSError for a pipe: to open it would wait for somebody at its other end."""
    if path.is_fifo():
        raise OSError(errno.EINVAL, "is a pipe")


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises OSError and DecodeError."""
    try:
        return from_toml(read_bounded(path).decode())
    except UnicodeDecodeError:
        raise DecodeError("no text in UTF-8") from None


def is_too_deep(value: Any) -> bool:
    """Whether lists and dicts lie in each other deeper than MAX_DEPTH. Level by level: it does not recurse itself."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inner:
            return False
        level = list(itertools.chain.from_iterable(inner))
    return True


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
