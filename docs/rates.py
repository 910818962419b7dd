"""Draws docs/rates.svg: python docs/rates.py

Law: the curves are those of `fourfold.LRSchedule`; nothing is drawn by hand.
"""

from pathlib import Path

import fourfold as ff
from fourfold.report.svg import Series, line_chart

STEPS, WARMUP, TUNED, BATCH = 900, 90, 64, 512
STYLE = """<style>
  text { font: 500 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #737d88 }
  .name { font-weight: 700 } .end { text-anchor: end } .middle { text-anchor: middle }
  .grid { stroke: #737d88; stroke-opacity: 0.25 } .axis { stroke: #737d88 }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round }
  .c0 { stroke: #2f76b5 } .c1 { stroke: #c2620a } .c2 { stroke: #2b8454 } .c3 { stroke: #d0405f }
  .c4 { stroke: #8a68cc }
</style>"""


def draw() -> str:
    rows = [(curve, curve, "linear") for curve in ("constant", "step", "linear", "cosine")]
    series = []
    for colour, (name, curve, scale) in enumerate([*rows, ("cosine, √", "cosine", "sqrt")]):
        schedule = ff.LRSchedule(schedule=curve, scale=scale, warmup=WARMUP, batch_size=TUNED)
        factor = schedule.lr_lambda(steps=STEPS, batch_size=BATCH)
        series.append(Series(name, [(step, factor(step)) for step in range(0, STEPS + 1, 3)], colour))
    title = f"Schedules after {WARMUP} steps of warm-up, batch {BATCH} of {TUNED}"
    drawing = line_chart(series, x="step", y="rate / tuned rate", title=title, from_zero=True)
    head, close, rest = drawing.partition("</title>")
    return f"{head}{close}{STYLE}{rest}\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
