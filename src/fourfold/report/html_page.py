"""HTML page: the frame of every page, its cards, and tables of names and values.

card  a part of the page: a heading, and a drawing or a table
Law: everything that comes from a run is escaped; the page loads nothing and is well-formed XML.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from fourfold.report.hover import SCRIPT
from fourfold.report.html_table import render_text
from fourfold.report.style import CSS


def render_page(title: str, subtitle: str, body: str, *, head: str = "") -> str:
    """A page. `body` and `head` are HTML, the others texts."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{render_text(title)} · Fourfold</title><style>{CSS}</style>{head}</head>\n"
        f'<body><main><h1>{render_text(title)}</h1><p class="under">{render_text(subtitle)}</p>{body}</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def render_card(content: str, *, wide: bool = False) -> str:
    """A card with this HTML; "" without any."""
    return f'<section class="card{" wide" if wide else ""}">{content}</section>' if content else ""


def render_values(title: str, values: Mapping[str, Any], *, tag: str = "h2") -> str:
    """A heading, and a table of names and values."""
    rows = (
        f"<tr><th>{render_text(name)}</th><td>{render_text(format_value(value))}</td></tr>"
        for name, value in values.items()
    )
    return f'<{tag}>{escape(title)}</{tag}><table class="words">{"".join(rows)}</table>'


def format_value(value: Any) -> str:
    """A value of a plan or a setting: 3, true, none."""
    if isinstance(value, dict):
        return ", ".join(f"{name} = {format_value(each)}" for name, each in value.items()) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
