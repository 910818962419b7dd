"""Text tables: rows of cells as aligned lines.

Law: no line ends in spaces, and a column that is empty in every row takes no room.
"""

from collections.abc import Sequence


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
