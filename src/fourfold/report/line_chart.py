"""Line chart: curves, dots and marks over one axis.

series  points under one name; `colour` numbers a class of the page's style sheet
figure  a chart with its legend as text next to it, and its values in attributes, which the page's script shows
Law: a figure shows exactly the values that it draws; from NUM_COLOURS curves on, colours repeat with dashes.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from fourfold.report.palette import CURVES
from fourfold.report.svg import LETTER_WIDTH, Frame, axis_ticks, format_number, format_ticks, render_svg

Point = tuple[float, float]
NUM_COLOURS = len(CURVES)
WIDTH, HEIGHT = 560.0, 300.0
# Marks on the horizontal axis: (top, bottom) relative to the bottom of the frame; a rule begins at the frame's top.
MARK_EXTENTS = {"rule": (0.0, 0.0), "peg": (-9.0, 0.0), "tick": (1.0, 7.0)}


class Series(NamedTuple):
    """Points (x, y) under one name, x ascending.

    kind       "line", "linked" (a line with dots), "faint" (a line behind others, not in the legend), "dots", or a key
               of MARK_EXTENTS (marks at each x)
    in_legend  whether the legend names it
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    kind: str = "line"
    in_legend: bool = True

    @property
    def style(self) -> str:
        """The classes of its colour."""
        is_dashed = self.kind in ("line", "linked") and self.colour >= NUM_COLOURS
        return f"c{self.colour % NUM_COLOURS}{' dashed' if is_dashed else ''}"

    @property
    def is_named(self) -> bool:
        return bool(self.name and self.in_legend and self.points) and self.kind != "faint"


def line_chart(
    series: Sequence[Series], *, x: str, y: str, title: str, from_zero: bool = False, legend: bool = False
) -> str:
    """Curves in one frame, with a legend in the drawing. `x` and `y` name the axes with their units.

    `legend=True` names a single curve too.
    """
    frame = _frame(series, from_zero=from_zero)
    if frame is None:
        return ""
    least = 1 if legend else 2
    parts = [*_draw(frame, series, x=x, y=y), _legend(series, right=frame.right, least=least)]
    return render_svg(WIDTH, HEIGHT, title, parts)


def line_figure(
    series: Sequence[Series], *, x: str, y: str, title: str, from_zero: bool = False, legend: bool = False
) -> str:
    """As `line_chart`, with the legend as text, and with its values for the page's script; "" without points."""
    frame = _frame(series, from_zero=from_zero)
    if frame is None:
        return ""
    named = [each for each in series if each.is_named]
    named.sort(key=lambda each: each.kind in MARK_EXTENTS)
    keys = "".join(f"<span>{_legend_key(each)}{escape(each.name)}</span>" for each in named)
    caption = f"<figcaption>{keys}</figcaption>" if len(named) >= (1 if legend else 2) else ""
    shown = [
        {"name": each.name, "colour": each.colour % NUM_COLOURS, "points": [[*map(_rounded, p)] for p in each.points]}
        for each in series
        if each.kind not in MARK_EXTENTS and each.points
    ]
    attributes = {
        "tabindex": "0",
        "data-x": x,
        "data-frame": " ".join(f"{value:.9g}" for value in frame),
        "data-series": json.dumps(shown, separators=(",", ":")),
    }
    text = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
    drawing = render_svg(WIDTH, HEIGHT, title, _draw(frame, series, x=x, y=y), attributes=text)
    return f"<figure>{caption}{drawing}</figure>"


def _rounded(value: float) -> float:
    """The value with as many digits as a reader is shown, which keeps the page short."""
    return float(f"{value:.7g}")


def _frame(series: Sequence[Series], *, from_zero: bool) -> Frame | None:
    """The frame around the points of all curves; None without points."""
    ys = [y for each in series if each.kind not in MARK_EXTENTS for _, y in each.points]
    if not ys:
        return None
    xs = [x for each in series for x, _ in each.points]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    margin = 0.05 * ((high - low) or abs(high) or 1.0)
    return Frame(
        left=58, right=WIDTH - 14, top=30, bottom=HEIGHT - 42,
        x0=min(xs), x1=max(xs), y0=low if from_zero else low - margin, y1=high + margin,
    )  # fmt: skip


def _draw(frame: Frame, series: Sequence[Series], *, x: str, y: str) -> list[str]:
    drawn = [
        _marks(frame, each) if each.kind in MARK_EXTENTS else _curve(frame, each) for each in series if each.points
    ]
    return [_axes(frame, x=x, y=y), *drawn]


def _axes(frame: Frame, *, x: str, y: str) -> str:
    parts = []
    ticks = axis_ticks(frame.y0, frame.y1)
    for value, text in zip(ticks, format_ticks(ticks), strict=True):
        at = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="end" x="{frame.left - 8}" y="{at + 4:.1f}">{text}</text>')
    ticks = axis_ticks(frame.x0, frame.x1, 6)
    for value, text in zip(ticks, format_ticks(ticks), strict=True):
        at = frame.x(value)
        parts.append(f'<text class="middle" x="{at:.1f}" y="{frame.bottom + 18}">{text}</text>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>')
    parts.append(f'<text class="name" x="0" y="14">{escape(y)}</text>')
    parts.append(f'<text class="name end" x="{frame.right}" y="{frame.bottom + 36}">{escape(x)}</text>')
    return "".join(parts)


def _curve(frame: Frame, series: Series) -> str:
    positions = [(frame.x(px), frame.y(py)) for px, py in series.points]
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in positions)
    kind = "line" if series.kind == "linked" else series.kind
    line = f'<path class="{kind} {series.style}" d="M{path}"/>' if kind != "dots" and len(positions) > 1 else ""
    if line and series.kind != "linked":
        return line
    dots = (
        f'<circle class="dot {series.style}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
        f"<title>{escape(series.name)} {value:.6g} at {format_number(at)}</title></circle>"
        for (px, py), (at, value) in zip(positions, series.points, strict=True)
    )
    return line + "".join(dots)


def _marks(frame: Frame, series: Series) -> str:
    upper, lower = MARK_EXTENTS[series.kind]
    top = frame.top if series.kind == "rule" else frame.bottom + upper
    parts = []
    # One mark for several at the same place.
    for at, value in {round(frame.x(value)): value for value, _ in series.points}.items():
        tip = f"<title>{escape(series.name)} at {format_number(value)}</title>"
        parts.append(
            f'<path class="{series.kind} c{series.colour}" d="M{at} {top}V{frame.bottom + lower}">{tip}</path>'
        )
    return "".join(parts)


def _legend(series: Sequence[Series], *, right: float, least: int) -> str:
    named = [each for each in series if each.is_named]
    named.sort(key=lambda each: each.kind in MARK_EXTENTS)
    parts, at = [], right
    for each in reversed(named):
        at -= LETTER_WIDTH * len(each.name)
        parts.append(f'<text x="{at:.1f}" y="14">{escape(each.name)}</text>')
        parts.append(_legend_mark(each, at))
        at -= 34
    return "".join(parts) if len(named) >= least else ""


def _legend_mark(series: Series, at: float) -> str:
    """The key of a series, to the left of `at`."""
    if series.kind == "dots":
        return f'<circle class="dot {series.style}" cx="{at - 10:.1f}" cy="10" r="4"/>'
    if series.kind in MARK_EXTENTS:
        top, bottom = (2, 17) if series.kind == "rule" else (5, 14)
        return f'<path class="{series.kind} {series.style}" d="M{at - 9:.1f} {top}V{bottom}"/>'
    return f'<line class="line {series.style}" x1="{at - 20:.1f}" x2="{at - 6:.1f}" y1="10" y2="10"/>'


def _legend_key(series: Series) -> str:
    return f'<svg viewBox="0 4 20 12" aria-hidden="true">{_legend_mark(series, 23.0)}</svg>'
