"""Draws docs/rates.svg: python docs/rates.py

Law: the curves are those of `fourfold.LRSchedule`; nothing is drawn by hand.
"""

from collections.abc import Iterator
from pathlib import Path

import fourfold as ff

STEPS, WARMUP, TUNED, BATCH = 900, 90, 64, 512
STYLE = """<style>
  text { font: 500 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #737d88 }
  .name { font-weight: 700 } .end { text-anchor: end } .middle { text-anchor: middle }
  .grid { stroke: #737d88; stroke-opacity: 0.25 } .axis { stroke: #737d88 }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round }
  .c0 { stroke: #2f76b5 } .c1 { stroke: #c2620a } .c2 { stroke: #2b8454 } .c3 { stroke: #d0405f }
  .c4 { stroke: #8a68cc }
</style>"""


WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 546, 30, 258  # of the frame
LETTER = 6.6


def draw() -> str:
    rows = [(curve, curve, "linear") for curve in ("constant", "step", "linear", "cosine")]
    curves = {}
    for name, curve, scale in [*rows, ("cosine, √", "cosine", "sqrt")]:
        schedule = ff.LRSchedule(schedule=curve, scale=scale, warmup=WARMUP, batch_size=TUNED)
        factor = schedule.lr_lambda(steps=STEPS, batch_size=BATCH)
        curves[name] = [(step, factor(step)) for step in range(0, STEPS + 1, 3)]
    most = 1.05 * max(y for points in curves.values() for _, y in points)
    title = f"Schedules after {WARMUP} steps of warm-up, batch {BATCH} of {TUNED}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{title}</title>'
    return "".join([head, STYLE, *_axes(most), *_curves(curves, most), "</svg>\n"])


def _axes(most: float) -> Iterator[str]:
    for value in range(0, int(most) + 1, 2):
        y = BOTTOM - (BOTTOM - TOP) * value / most
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text("end", LEFT - 8, y + 4, value)
    for step in range(0, STEPS + 1, 200):
        yield _text("middle", LEFT + (RIGHT - LEFT) * step / STEPS, BOTTOM + 18, step)
    yield f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    yield _text("name", 0, 14, "rate / tuned rate") + _text("name end", RIGHT, BOTTOM + 36, "step")


def _curves(curves: dict[str, list[tuple[int, float]]], most: float) -> Iterator[str]:
    at = RIGHT
    for colour, (name, points) in reversed([*enumerate(curves.items())]):
        places = ((LEFT + (RIGHT - LEFT) * x / STEPS, BOTTOM - (BOTTOM - TOP) * y / most) for x, y in points)
        yield f'<path class="line c{colour}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'
        at -= LETTER * len(name)
        yield _text("key", at, 14, name)
        yield f'<line class="line c{colour}" x1="{at - 20:.1f}" x2="{at - 6:.1f}" y1="10" y2="10"/>'
        at -= 34


def _text(style: str, x: float, y: float, text: object) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
