"""TOML writer: tables of plain values as TOML. The standard library only reads it.

value  a bool, an int, a float, a text, or a list or tuple of these
Law: `from_toml` reads what is written here as an equal value of the same type; a tuple becomes a list.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
        return _format_float(value)
    if isinstance(value, str):
        return _format_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    raise ValueError(f"a {type(value).__name__}")


def format_pair(key: str, value: Any) -> str:
    """`key = value`. Raises ValueError as `format_value` does."""
    return f"{key if BARE_KEY.fullmatch(key) else _format_text(key)} = {format_value(value)}"


def format_table(values: Mapping[str, Any]) -> Sequence[str]:
    """A line for each pair."""
    return [format_pair(key, value) for key, value in values.items()]


def _format_float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return repr(float(value))  # inf and 1e-05 are TOML


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
