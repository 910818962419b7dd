"""SVG: charts of bars, lanes and curves, and what all charts are made of, as text.

frame   the rectangle that the axes enclose, in the drawing's units (`viewBox`), and the values at its borders
lane    a row of blocks over time
series  points under one name; `colour` numbers a class of the page's style sheet
figure  curves with their legend as text next to them, and their values in attributes, which the page's script shows
Law: a drawing is well-formed XML and escapes every text; an axis with numbers has a name with its unit. A figure shows
exactly the values that it draws; from NUM_COLOURS curves on, colours repeat with dashes.
"""

import json
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from fourfold.report.style import CURVES

# ---- axes, bars and lanes --------------------------------------------------------------------------------------------


LETTER_WIDTH = 6.6  # of an average letter, in the drawing's units


class _Frame(NamedTuple):
    """Maps values to the drawing: x in [x0, x1] to [left, right], y in [y0, y1] to [bottom, top]."""

    left: float
    right: float
    top: float
    bottom: float
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / ((self.x1 - self.x0) or 1.0) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / ((self.y1 - self.y0) or 1.0) * (self.bottom - self.top)


class Bar(NamedTuple):
    """A row of `bar_chart`: `name` on the left, `label` on the right; `style` is the bar's class."""

    name: str
    value: float
    label: str
    style: str


class Block(NamedTuple):
    """A block of a lane, `start` to `stop`; a mark if they are equal. `style` is its class."""

    name: str
    start: float
    stop: float
    style: str


class Lane(NamedTuple):
    """A row of `lane_chart`; without a name, a gap."""

    name: str
    blocks: Sequence[Block]


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _format_number(value: float) -> str:
    """A tick's label: 1,000, 0.25, 3."""
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.6g}"


def bar_chart(rows: Sequence[Bar], *, title: str) -> str:
    """One horizontal bar per row, with its name on the left and its label on the right."""
    width, each = 560.0, 30.0
    left, right = 130.0, width - 170
    most = max((row.value for row in rows), default=0.0) or 1.0
    parts = []
    for index, row in enumerate(rows):
        top = 6 + index * each
        length = (right - left) * row.value / most
        parts.append(f'<text class="end" x="{left - 10}" y="{top + 15}">{escape(row.name)}</text>')
        parts.append(
            f'<rect class="{row.style}" x="{left}" y="{top}" width="{max(length, 1):.1f}" height="20" rx="3"/>'
        )
        parts.append(f'<text class="figure" x="{left + length + 8:.1f}" y="{top + 15}">{escape(row.label)}</text>')
    return _render_svg(width, 8 + each * len(rows), title, parts, attributes=' class="bars"')


def lane_chart(
    rows: Sequence[Lane], *, end: float, title: str, x: str, width: float = 1120, unit: str = "ms", decimals: int = 3
) -> str:
    """Rows of blocks over a time axis from 0 to `end`. A row without a name is a gap; its blocks are not drawn.

    `unit` of the times, and their `decimals` where a pointer shows them; `width` of the drawing.
    """
    left = max(150.0, 16 + LETTER_WIDTH * max((len(row.name) for row in rows), default=0))
    each = 28.0
    tops, at = [], 8.0
    for row in rows:
        tops.append(at)
        at += each if row.name else 14.0
    frame = _Frame(left=left, right=width - 16, top=8, bottom=at + 2, x0=0, x1=end, y0=0, y1=1)
    parts = []
    ticks = axis_ticks(0, end, 8)
    for value, text in zip(ticks, format_ticks(ticks), strict=True):
        grid_x = frame.x(value)
        parts.append(f'<line class="grid" x1="{grid_x:.1f}" x2="{grid_x:.1f}" y1="4" y2="{frame.bottom:.1f}"/>')
        parts.append(f'<text class="middle" x="{grid_x:.1f}" y="{frame.bottom + 16:.1f}">{text}</text>')
    parts.append(f'<text class="name end" x="{frame.right}" y="{frame.bottom + 34:.1f}">{escape(x)}</text>')
    for row, top in zip(rows, tops, strict=True):
        if row.name:
            parts.append(f'<text class="end" x="{frame.left - 10}" y="{top + 15:.1f}">{escape(row.name)}</text>')
            for index, block in enumerate(row.blocks):
                tip = _tip(block, unit, decimals)
                parts.append(_block(frame, block, row.blocks[index + 1 :], top, tip))
    return _render_svg(width, frame.bottom + 40, title, parts)


def _tip(block: Block, unit: str, decimals: int) -> str:
    """What a pointer shows of a block."""
    start, length = (f"{value:.{decimals}f} {unit}" for value in (block.start, block.stop - block.start))
    text = f"{block.name} at {start}" if block.start == block.stop else f"{block.name}: {length} from {start}"
    return f"<title>{escape(text)}</title>"


def _block(frame: _Frame, block: Block, later: Sequence[Block], top: float, tip: str) -> str:
    """A block, with its name where there is room for it: `later` blocks are drawn over it."""
    left, right = frame.x(block.start), frame.x(block.stop)
    if block.start == block.stop:
        return f'<path class="mark {block.style}" d="M{left:.1f} {top - 2:.1f}v24">{tip}</path>'
    wide = max(right - left, 1.0)
    box = f'<rect class="{block.style}" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="20" rx="2">{tip}</rect>'
    start, stop = widest_gap(block, later)
    if frame.x(stop) - frame.x(start) < LETTER_WIDTH * len(block.name) + 6:
        return box
    middle = frame.x((start + stop) / 2)
    text = f'<text class="inside on-{block.style}" x="{middle:.1f}" y="{top + 14.5:.1f}">{escape(block.name)}</text>'
    return box + text


def widest_gap(block: Block, later: Sequence[Block]) -> tuple[float, float]:
    """The longest part of a block that no later one covers."""
    gaps, at = list[tuple[float, float]](), block.start
    for other in sorted(later, key=lambda each: each.start):
        if block.start < other.stop and other.start < block.stop:
            gaps.append((at, max(at, other.start)))
            at = max(at, other.stop)
    gaps.append((at, max(at, block.stop)))
    return max(gaps, key=lambda gap: gap[1] - gap[0])


def format_ticks(values: Sequence[float]) -> list[str]:
    """The labels of an axis, all with as many decimals as the longest needs; 0 has none."""
    texts = [_format_number(value) for value in values]
    if any("e" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{value:,.{decimals}f}" if value else "0" for value in values]


def _render_svg(width: float, height: float, title: str, parts: Sequence[str], *, attributes: str = "") -> str:
    """A drawing; `attributes` are further ones of its element, escaped already."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img"{attributes}>'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"


# ---- curves ----------------------------------------------------------------------------------------------------------


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
    return _render_svg(WIDTH, HEIGHT, title, parts)


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
    drawing = _render_svg(WIDTH, HEIGHT, title, _draw(frame, series, x=x, y=y), attributes=text)
    return f"<figure>{caption}{drawing}</figure>"


def _rounded(value: float) -> float:
    """The value with as many digits as a reader is shown, which keeps the page short."""
    return float(f"{value:.7g}")


def _frame(series: Sequence[Series], *, from_zero: bool) -> _Frame | None:
    """The frame around the points of all curves; None without points."""
    ys = [y for each in series if each.kind not in MARK_EXTENTS for _, y in each.points]
    if not ys:
        return None
    xs = [x for each in series for x, _ in each.points]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    margin = 0.05 * ((high - low) or abs(high) or 1.0)
    return _Frame(
        left=58, right=WIDTH - 14, top=30, bottom=HEIGHT - 42,
        x0=min(xs), x1=max(xs), y0=low if from_zero else low - margin, y1=high + margin,
    )  # fmt: skip


def _draw(frame: _Frame, series: Sequence[Series], *, x: str, y: str) -> list[str]:
    drawn = [
        _marks(frame, each) if each.kind in MARK_EXTENTS else _curve(frame, each) for each in series if each.points
    ]
    return [_axes(frame, x=x, y=y), *drawn]


def _axes(frame: _Frame, *, x: str, y: str) -> str:
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


def _curve(frame: _Frame, series: Series) -> str:
    positions = [(frame.x(px), frame.y(py)) for px, py in series.points]
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in positions)
    kind = "line" if series.kind == "linked" else series.kind
    line = f'<path class="{kind} {series.style}" d="M{path}"/>' if kind != "dots" and len(positions) > 1 else ""
    if line and series.kind != "linked":
        return line
    dots = (
        f'<circle class="dot {series.style}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
        f"<title>{escape(series.name)} {value:.6g} at {_format_number(at)}</title></circle>"
        for (px, py), (at, value) in zip(positions, series.points, strict=True)
    )
    return line + "".join(dots)


def _marks(frame: _Frame, series: Series) -> str:
    upper, lower = MARK_EXTENTS[series.kind]
    top = frame.top if series.kind == "rule" else frame.bottom + upper
    parts = []
    # One mark for several at the same place.
    for at, value in {round(frame.x(value)): value for value, _ in series.points}.items():
        tip = f"<title>{escape(series.name)} at {_format_number(value)}</title>"
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
