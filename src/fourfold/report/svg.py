"""SVG: charts of bars and lanes, and what all charts are made of, as text.

frame   the rectangle that the axes enclose, in the drawing's units (`viewBox`), and the values at its borders
lane    a row of blocks over time
Law: a drawing is well-formed XML and escapes every text; an axis with numbers has a name with its unit.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

LETTER_WIDTH = 6.6  # of an average letter, in the drawing's units


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


def format_number(value: float) -> str:
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
    return render_svg(width, 8 + each * len(rows), title, parts, attributes=' class="bars"')


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
    frame = Frame(left=left, right=width - 16, top=8, bottom=at + 2, x0=0, x1=end, y0=0, y1=1)
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
    return render_svg(width, frame.bottom + 40, title, parts)


def _tip(block: Block, unit: str, decimals: int) -> str:
    """What a pointer shows of a block."""
    start, length = (f"{value:.{decimals}f} {unit}" for value in (block.start, block.stop - block.start))
    text = f"{block.name} at {start}" if block.start == block.stop else f"{block.name}: {length} from {start}"
    return f"<title>{escape(text)}</title>"


def _block(frame: Frame, block: Block, later: Sequence[Block], top: float, tip: str) -> str:
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
    texts = [format_number(value) for value in values]
    if any("e" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{value:,.{decimals}f}" if value else "0" for value in values]


def render_svg(width: float, height: float, title: str, parts: Sequence[str], *, attributes: str = "") -> str:
    """A drawing; `attributes` are further ones of its element, escaped already."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img"{attributes}>'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"
