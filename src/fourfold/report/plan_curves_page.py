"""Plan curves page: what if there were more devices, a larger batch, a faster network, as one HTML file.

Law: the page has every number of the text.
"""

from collections.abc import Callable, Sequence

from fourfold.analysis.plan_curves import DEVICES, Curve, Point, curve_rows
from fourfold.report.html_page import render_card, render_page
from fourfold.report.html_table import render_row, render_table, render_text
from fourfold.report.line_chart import Series, line_figure

AXES = {"memory": ("memory of a device, GiB", 2.0**30), "network": ("network, GB/s", 1e9)}


def render_curves(curves: Sequence[Curve], *, title: str, under: str) -> str:
    """The page of `fourfold plan` with lists."""
    unit = curves[0].unit
    cards = [render_card(_chart(curves, "Throughput", f"{unit} a second", lambda _, point: point.rate))]
    if curves[0].key == DEVICES:
        cards.append(render_card(_chart(curves, "Efficiency of a device", "of the first point, %", _percent_of_first)))
    else:
        cards.append(render_card(_chart(curves, "Step", "ms", lambda _, point: _milliseconds(point))))
    cards += [render_card(_table_card(curve), wide=True) for curve in curves]
    return render_page(title, under, f'<div class="cards">{"".join(cards)}</div>')


def _percent_of_first(curve: Curve, point: Point) -> float | None:
    efficiency = curve.efficiency(point)
    return None if efficiency is None else 100 * efficiency


def _milliseconds(point: Point) -> float | None:
    return None if point.best is None else 1e3 * point.best.seconds


def _chart(curves: Sequence[Curve], title: str, y: str, value: Callable[[Curve, Point], float | None]) -> str:
    key = curves[0].key
    name, factor = AXES.get(key, (key, 1.0))
    series = []
    for number, curve in enumerate(curves):
        pairs = ((point.value, value(curve, point)) for point in curve.points)
        points = sorted((x / factor, y) for x, y in pairs if y is not None)
        series.append(Series(curve.label, points, number, "linked"))
    drawing = line_figure(series, x=name, y=y, title=title, from_zero=True, legend=True)
    return f"<h2>{title}</h2>{drawing or '<p>No plan fits.</p>'}"


def _table_card(curve: Curve) -> str:
    head, *rows = curve_rows(curve)
    table = render_table(head, [render_row(row) for row in rows], style="plans")
    return f"<h2>{render_text(curve.label[:1].upper() + curve.label[1:])}</h2>{table}"
