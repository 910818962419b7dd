"""Terminal text: text from data, files or users made safe to print, lines that fit into the terminal, tables.

Law: escaped text cannot control a terminal, and escaping twice is the same as escaping once. Wrapped lines fit into the
width, except for words that are longer.
Law: no line ends in spaces, and a column that is empty in every row takes no room.
"""

import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence

ALLOWED_CONTROLS = "\n\t"
MIN_WIDTH = 40
MAX_LABEL = 40  # characters in front of a text that continues below itself, such as the name of a setting
FRAME_INDENT = " " * 4  # of a line of code in a traceback
MARKS = re.compile(r" +[~^]+")
COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)|^ +(?:need|try) ")


def escape_controls(text: str) -> str:
    r"""The text with its control characters written out: "\x1b[31m", "\u202e". Newlines and tabs stay.

    Escapes C0 and C1 controls, DEL, bidirectional and other format controls, line separators, surrogates, and
    unassigned code points: they could colour, clear or reorder what a terminal shows.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_safe(char) else char.encode("unicode_escape").decode() for char in text)


def terminal_width() -> int:
    """The columns of this process's terminal, or COLUMNS; 80 without either."""
    return max(MIN_WIDTH, shutil.get_terminal_size().columns)


def wrap_lines(text: str, width: int | None = None) -> str:
    """The text with its long lines wrapped to `width`, by default the terminal's.

    A line goes on below its last column if that begins near the left, else two columns to the right of its start. Of a
    frame of a traceback, the place stays as it is, and of its line of code the part that is marked is shown.
    """
    width, lines, is_frame, part = width or terminal_width(), list[str](), False, slice(None)
    given = text.split("\n")
    for line, below in zip(given, [*given[1:], ""], strict=True):
        is_code = is_frame and line.startswith(FRAME_INDENT)
        is_frame = is_code or line.startswith('  File "')
        if is_code:
            part = part if MARKS.fullmatch(line) else _shown_part(line, below, width)
            lines.append(FRAME_INDENT + line.removeprefix(FRAME_INDENT)[part].rstrip())
        else:
            lines += [line] if is_frame else _wrap(line, width)
    return "\n".join(lines)


def _shown_part(code: str, below: str, width: int) -> slice:
    """Of a frame's line of code, what fits: from a little in front of the first of the marks below it."""
    room, length = width - len(FRAME_INDENT), len(code) - len(FRAME_INDENT)
    marked = len(below) - len(below.lstrip()) - len(FRAME_INDENT) if MARKS.fullmatch(below) else 0
    start = max(0, min(marked - room // 4, length - room))
    return slice(start, start + room)


def _wrap(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    columns = [match.end() for match in COLUMN.finditer(line)]
    below = columns[-1] if columns and columns[-1] <= MAX_LABEL else len(line) - len(line.lstrip()) + 2
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * below, replace_whitespace=False)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(line)


def _is_safe(char: str) -> bool:
    # Category Zs: spaces such as U+00A0, which isprintable() refuses.
    return char.isprintable() or char in ALLOWED_CONTROLS or unicodedata.category(char) == "Zs"


# ---- text table ------------------------------------------------------------------------------------------------------

INDENT = 2  # columns in front of most tables
MAX_LINE_LENGTH = 100


def align_columns(rows: Sequence[Sequence[str]], alignments: str, *, gap: str = "  ") -> list[str]:
    """One line per row. `alignments` has a character per column: `<` sets it to the left, `>` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            f"{cell:{alignment}{width}}"
            for cell, alignment, width in zip(row, alignments, widths, strict=True)
            if width
        ).rstrip()
        for row in rows
    ]


def table_lines(rows: Sequence[Sequence[str]], alignments: str, *, gap: str = "  ") -> list[str]:
    """As `align_columns`. Columns that do not fit into the terminal follow as a table below, with the first column."""
    widths, room = [max(map(len, column)) for column in zip(*rows, strict=True)], terminal_width() - INDENT
    tables = [[0]]
    for column in range(1, len(widths)):
        shown = [widths[each] for each in (*tables[-1], column) if widths[each]]
        if len(tables[-1]) > 1 and sum(shown) + len(gap) * (len(shown) - 1) > room:
            tables.append([0])
        tables[-1].append(column)
    lines: list[str] = []
    for columns in tables:
        cells = [[row[each] for each in columns] for row in rows]
        lines += [*[""][: len(lines)], *align_columns(cells, "".join(alignments[each] for each in columns), gap=gap)]
    return lines


def indent(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}".rstrip() for line in lines)


def wrap(words: Sequence[str]) -> list[str]:
    """The words in lines that fit into the terminal, of at most MAX_LINE_LENGTH characters."""
    width = min(MAX_LINE_LENGTH, terminal_width() - INDENT)
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]
