"""SVG: charts of lines, bars and lanes, as text.

frame   the rectangle that the axes enclose, in the drawing's units (`viewBox`), and the values at its borders
series  points under one name; `colour` numbers a class of the page's style sheet
lane    a row of blocks over time
Law: a drawing is well-formed XML and escapes every text; an axis with numbers has a name with its unit.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Point = tuple[float, float]
LETTER_WIDTH = 6.6  # of an average letter, in the drawing's units
NUM_COLOURS = 6
# Marks on the horizontal axis: (top, bottom) relative to the bottom of the frame; a rule begins at the frame's top.
MARK_EXTENTS = {"rule": (0.0, 0.0), "peg": (-9.0, 0.0), "tick": (1.0, 7.0)}


class Series(NamedTuple):
    """Points (x, y) under one name.

    kind  "line", "faint" (a line behind others, not in the legend), "dots", or a key of MARK_EXTENTS (marks at each x)
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    kind: str = "line"


class Frame(NamedTuple):
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
    """A block of a lane, `start` to `stop` in ms; a mark if they are equal. `style` is its class."""

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


def format_number(value: float) -> str:
    """A tick's label: 1,000, 0.25, 3."""
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.6g}"


def line_chart(
    series: Sequence[Series], *, x: str, y: str, title: str, from_zero: bool = False, legend: bool = False
) -> str:
    """Curves in one frame. `x` and `y` name the axes with their units; `legend=True` names a single curve too."""
    width, height = 560.0, 300.0
    points = [point for each in series if each.kind not in MARK_EXTENTS for point in each.points]
    if not points:
        return ""
    xs, ys = [p[0] for each in series for p in each.points], [p[1] for p in points]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    margin = 0.05 * ((high - low) or abs(high) or 1.0)
    frame = Frame(
        left=58, right=width - 14, top=30, bottom=height - 42,
        x0=min(xs), x1=max(xs), y0=low if from_zero else low - margin, y1=high + margin,
    )  # fmt: skip
    drawn = [
        _marks(frame, each) if each.kind in MARK_EXTENTS else _curve(frame, each) for each in series if each.points
    ]
    body = [_axes(frame, x=x, y=y), *drawn]
    return _render_svg(width, height, title, [*body, _legend(series, right=frame.right, least=1 if legend else 2)])


def _axes(frame: Frame, *, x: str, y: str) -> str:
    parts = []
    for value in axis_ticks(frame.y0, frame.y1):
        at = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="end" x="{frame.left - 8}" y="{at + 4:.1f}">{format_number(value)}</text>')
    for value in axis_ticks(frame.x0, frame.x1, 6):
        at = frame.x(value)
        parts.append(f'<text class="middle" x="{at:.1f}" y="{frame.bottom + 18}">{format_number(value)}</text>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>')
    parts.append(f'<text class="name" x="0" y="14">{escape(y)}</text>')
    parts.append(f'<text class="name end" x="{frame.right}" y="{frame.bottom + 36}">{escape(x)}</text>')
    return "".join(parts)


def _curve(frame: Frame, series: Series) -> str:
    colour = f"c{series.colour % NUM_COLOURS}"
    positions = [(frame.x(px), frame.y(py)) for px, py in series.points]
    if series.kind == "dots" or len(positions) == 1:
        dots = (
            f'<circle class="dot {colour}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
            f"<title>{escape(series.name)} {value:.6g} at {format_number(at)}</title></circle>"
            for (px, py), (at, value) in zip(positions, series.points, strict=True)
        )
        return "".join(dots)
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in positions)
    return f'<path class="{series.kind} {colour}" d="M{path}"/>'


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
    named = [each for each in series if each.name and each.kind != "faint" and each.points]
    named.sort(key=lambda each: each.kind in MARK_EXTENTS)
    parts, at = [], right
    for each in reversed(named):
        at -= LETTER_WIDTH * len(each.name)
        parts.append(f'<text x="{at:.1f}" y="14">{escape(each.name)}</text>')
        colour = f"c{each.colour % NUM_COLOURS}"
        if each.kind == "dots":
            parts.append(f'<circle class="dot {colour}" cx="{at - 10:.1f}" cy="10" r="4"/>')
        elif each.kind in MARK_EXTENTS:
            top, bottom = (2, 17) if each.kind == "rule" else (5, 14)
            parts.append(f'<path class="{each.kind} {colour}" d="M{at - 9:.1f} {top}V{bottom}"/>')
        else:
            parts.append(f'<line class="line {colour}" x1="{at - 20:.1f}" x2="{at - 6:.1f}" y1="10" y2="10"/>')
        at -= 34
    return "".join(parts) if len(named) >= least else ""


def bar_chart(rows: Sequence[Bar], *, title: str) -> str:
    """One horizontal bar per row, with its name on the left and its label on the right."""
    width, each = 560.0, 30.0
    left, right = 130.0, width - 130
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
    return _render_svg(width, 8 + each * len(rows), title, parts)


def lane_chart(rows: Sequence[Lane], *, end: float, title: str, x: str) -> str:
    """Rows of blocks over a time axis from 0 to `end`. A row without a name is a gap; its blocks are not drawn."""
    width, each = 1120.0, 28.0
    tops, at = [], 8.0
    for row in rows:
        tops.append(at)
        at += each if row.name else 14.0
    frame = Frame(left=150, right=width - 16, top=8, bottom=at + 2, x0=0, x1=end, y0=0, y1=1)
    parts = []
    for value in axis_ticks(0, end, 8):
        grid_x = frame.x(value)
        parts.append(f'<line class="grid" x1="{grid_x:.1f}" x2="{grid_x:.1f}" y1="4" y2="{frame.bottom:.1f}"/>')
        parts.append(f'<text class="middle" x="{grid_x:.1f}" y="{frame.bottom + 16:.1f}">{format_number(value)}</text>')
    parts.append(f'<text class="name end" x="{frame.right}" y="{frame.bottom + 34:.1f}">{escape(x)}</text>')
    for row, top in zip(rows, tops, strict=True):
        if row.name:
            parts.append(f'<text class="end" x="{frame.left - 10}" y="{top + 15:.1f}">{escape(row.name)}</text>')
            parts += [_block(frame, block, row.blocks[index + 1 :], top) for index, block in enumerate(row.blocks)]
    return _render_svg(width, frame.bottom + 40, title, parts)


def _block(frame: Frame, block: Block, later: Sequence[Block], top: float) -> str:
    """A block, with its name where there is room for it: `later` blocks are drawn over it."""
    left, right = frame.x(block.start), frame.x(block.stop)
    if block.start == block.stop:
        tip = f"<title>{escape(block.name)} at {block.start:.3f} ms</title>"
        return f'<path class="mark {block.style}" d="M{left:.1f} {top - 2:.1f}v24">{tip}</path>'
    tip = f"<title>{escape(block.name)}: {block.stop - block.start:.3f} ms from {block.start:.3f} ms</title>"
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


def _render_svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"
