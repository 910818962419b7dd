"""Text tables: rows of cells as aligned lines, and words in lines that fit into the terminal.

Law: no line ends in spaces, and a column that is empty in every row takes no room.
"""

from collections.abc import Sequence

from fourfold.words.terminal_text import terminal_width

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
