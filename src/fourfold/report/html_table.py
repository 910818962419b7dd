"""HTML table: rows of text for the page.

Law: every text is escaped here, and characters that XML does not allow are written out.
"""

from collections.abc import Sequence
from html import escape

from fourfold.words.terminal_text import escape_controls

MAX_ROWS = 20  # the rows shown without a click
UNKNOWN = "–"


def render_text(text: str) -> str:
    """A text as HTML."""
    return escape(escape_controls(text))


def render_row(texts: Sequence[str], tag: str = "td") -> str:
    """A row."""
    return f"<tr>{''.join(_render_cell(text, tag) for text in texts)}</tr>"


def _render_cell(text: str, tag: str) -> str:
    class_attribute = ' class="unknown"' if text == UNKNOWN else ""
    return f"<{tag}{class_attribute}>{render_text(text)}</{tag}>"


def render_table(columns: Sequence[str], rows: Sequence[str], *, style: str) -> str:
    """A table of rows; all but the last MAX_ROWS are folded away."""
    earlier, shown = rows[:-MAX_ROWS], rows[-MAX_ROWS:]
    table = _render_rows(columns, shown, style)
    if not earlier:
        return table
    return (
        f"<details><summary>{len(earlier):,} earlier</summary>{_render_rows(columns, earlier, style)}</details>{table}"
    )


def _render_rows(columns: Sequence[str], rows: Sequence[str], style: str) -> str:
    return f'<div class="scroll"><table class="listed {style}">{render_row(columns, "th")}{"".join(rows)}</table></div>'
