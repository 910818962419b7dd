"""Table: rows of text for the page.

Law: every text is escaped here, and what XML cannot hold is not let through.
"""

from collections.abc import Sequence
from html import escape

from fourfold.words.text import escaped

MOST = 20  # rows that are shown at once
UNKNOWN = "–"


def cells(texts: Sequence[str], tag: str = "td") -> str:
    """A row."""
    return f"<tr>{''.join(_cell(text, tag) for text in texts)}</tr>"


def _cell(text: str, tag: str) -> str:
    kind = ' class="unknown"' if text == UNKNOWN else ""
    return f"<{tag}{kind}>{escape(escaped(text))}</{tag}>"


def many(heads: Sequence[str], rows: Sequence[str], *, style: str) -> str:
    """A table of rows; all but the last `MOST` of them only when they are asked for."""
    earlier, late = rows[:-MOST], rows[-MOST:]
    table = _table(heads, late, style)
    if not earlier:
        return table
    return f"<details><summary>{len(earlier):,} earlier</summary>{_table(heads, earlier, style)}</details>{table}"


def _table(heads: Sequence[str], rows: Sequence[str], style: str) -> str:
    return f'<div class="scroll"><table class="listed {style}">{cells(heads, "th")}{"".join(rows)}</table></div>'
