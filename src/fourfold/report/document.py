"""Document: what a page shows, as data that `page.html` draws.

card    a part of the page: a title, and texts, tables and drawings
series  points under one name, x ascending; `colour` numbers one of the page's colours
Law: a page is the one static file with this data in it: it loads nothing, and no script runs but its own, whatever the
data holds. Characters that control a terminal are written out. A value that is not finite leaves a gap.
"""

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.words.terminal_text import escape_controls

UNKNOWN = "–"
Part = dict[str, Any]
Card = dict[str, Any]
Point = tuple[float, float]


class Series(NamedTuple):
    """A curve or marks.

    kind   "line", "linked" (a line with dots), "faint" (a line behind others), "dots"; marks at each x: "rule", "peg",
           "tick"
    named  whether the legend names it
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    kind: str = "line"
    named: bool = True


class Block(NamedTuple):
    """A block of a lane, `start` to `stop`; a mark if they are equal. `style` is the name of a colour."""

    name: str
    start: float
    stop: float
    style: str


# ---- parts -----------------------------------------------------------------------------------------------------------


def card(title: str, *parts: Part | None, wide: bool = False, columns: bool = False) -> Card:
    """A card; a part that is None is left out. `columns`: a wide card in two columns."""
    return {"title": title, "wide": wide, "columns": columns, "parts": [each for each in parts if each]}


def text(content: str) -> Part:
    """A paragraph."""
    return {"kind": "text", "text": content}


def heading(content: str) -> Part:
    """A heading within a card."""
    return {"kind": "heading", "text": content}


def note(content: str, keys: Sequence[tuple[str, str]] = ()) -> Part | None:
    """A small text, after the names of colours: (name, style). None if there is nothing to say."""
    return {"kind": "note", "text": content, "keys": keys} if content or keys else None


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, style: str = "listed", **options: Any) -> Part:
    """A table, without columns one of names and texts.

    style  "listed" folds all but the last rows away, "compared" does not, "runs" has a column for each run
    total  whether the last row is a sum
    best   the cells to mark, as (row, column)
    """
    return {"kind": "table", "columns": columns, "rows": rows, "style": style, **options}


def values(pairs: Mapping[str, Any]) -> Part:
    """A table of names and values."""
    return table((), [(name, format_value(value)) for name, value in pairs.items()], style="values")


def fold(title: str, *parts: Part, opened: bool = False) -> Part:
    """Parts that a click shows."""
    return {"kind": "fold", "title": title, "open": opened, "parts": parts}


def curves(
    series: Sequence[Series], *, x: str, y: str, title: str, from_zero: bool = False, legend: bool = False
) -> Part | None:
    """Curves in one frame; None without points. `x` and `y` name the axes with their units.

    `legend=True` names a single curve too.
    """
    drawn = [each._replace(points=[_rounded(p) for p in each.points if all(map(math.isfinite, p))]) for each in series]
    drawn = [each._asdict() for each in drawn if each.points]
    if all(each["kind"] in ("rule", "peg", "tick") for each in drawn):
        return None
    return {"kind": "lines", "series": drawn, "x": x, "y": y, "title": title, "zero": from_zero, "legend": legend}


def _rounded(point: Point) -> Point:
    """The point with as many digits as a reader is shown, which keeps the page short."""
    return float(f"{point[0]:.7g}"), float(f"{point[1]:.7g}")


def bars(rows: Sequence[tuple[str, float, str, str]], *, title: str) -> Part:
    """Horizontal bars: (name on the left, value, label on the right, style)."""
    return {"kind": "bars", "bars": rows, "title": title}


def lanes(rows: Mapping[str, Sequence[Block]], *, end: float, title: str, x: str = "time, ms", **options: Any) -> Part:
    """Rows of blocks over a time axis from 0 to `end`; one without a name is a gap.

    `unit` of the times, and their `decimals` where a pointer shows them; `width` of the drawing.
    """
    shown = {"width": 1120, "unit": "ms", "decimals": 3, **options}
    return {"kind": "lanes", "lanes": [*rows.items()], "end": end, "title": title, "x": x, **shown}


def format_value(value: Any) -> str:
    """A value of a plan or a setting: 3, true, none."""
    if isinstance(value, dict):
        return ", ".join(f"{name} = {format_value(each)}" for name, each in value.items()) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---- page ------------------------------------------------------------------------------------------------------------


def document(
    title: str, under: str, cards: Sequence[Card | None], *, figures: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The data of a page. `figures`: (value, name) of the tiles; a card that is None is left out."""
    return {"title": title, "under": under, "figures": figures, "cards": [each for each in cards if each]}


def encode(data: Any) -> str:
    """The data as JSON, which no text of it ends in HTML."""
    return json.dumps(_written_out(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _written_out(data: Any) -> Any:
    if isinstance(data, str):
        return escape_controls(data)
    if isinstance(data, dict):
        return {name: _written_out(each) for name, each in data.items()}
    return [_written_out(each) for each in data] if isinstance(data, list | tuple) else data


PAGE = Path(__file__).with_name("page.html")


@functools.cache
def _template() -> str:
    return PAGE.read_text(encoding="utf-8")


@functools.cache
def security_policy() -> str:
    """What a browser lets the page do: run its own script, and ask the server that it came from."""
    (script,) = re.findall(r"<script>(.*?)</script>", _template(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def render(data: Mapping[str, Any]) -> str:
    """The page with this data."""
    return _template().replace("%POLICY%", security_policy()).replace("%DATA%", encode(data))
