"""Plan curves: what if there were more devices, a larger batch, a faster network: the best plan of each.

strong  the batch stays as it is while devices are added
weak    the batch grows with the devices
efficiency  the rate of a device, over that of a device at the first point of the curve
Law: a curve has a point for each value that was asked for; where nothing fits, the point says so.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fourfold.planner.plan_text import plan_words
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.workload import Workload
from fourfold.words.text_table import table_lines
from fourfold.words.units import format_bytes, format_percent, format_si, format_step_seconds

DEVICES = "devices"


class Point(NamedTuple):
    """The best plan at one value. Without one, `cause` says why."""

    text: str
    value: float
    workload: Workload | None
    best: Prediction | None
    cause: str = ""

    @property
    def rate(self) -> float | None:
        """Tokens or samples a second; None where nothing fits."""
        return None if self.best is None or self.workload is None else self.workload.units_per_second(self.best)


class Curve(NamedTuple):
    """The points of one curve: `label` says what is the same in all of them, `key` what is not."""

    key: str
    label: str
    points: tuple[Point, ...]

    def efficiency(self, point: Point) -> float | None:
        """The rate of a device over that of the first point; None where nothing fits, or devices stay the same."""
        first = next((each for each in self.points if each.rate is not None), None)
        if self.key != DEVICES or first is None or first.rate is None or point.rate is None:
            return None
        return point.rate / point.value / (first.rate / first.value)

    @property
    def unit(self) -> str:
        """What the rates count."""
        return next((each.workload.unit for each in self.points if each.workload is not None), "samples")


def format_curves(curves: Sequence[Curve], *, head: str) -> str:
    """The text of `fourfold plan` with lists."""
    sections = [head]
    for curve in curves:
        rows = curve_rows(curve)
        lines = table_lines(rows, ">" * (len(rows[0]) - 1) + "<")
        sections.append("\n".join([curve.label, *(f"  {line}" for line in lines)]))
    return "\n\n".join(sections)


def curve_rows(curve: Curve) -> list[tuple[str, ...]]:
    """A row for each point, with a row of heads."""
    rows = [(curve.key, "step", f"{curve.unit}/s", "efficiency" if curve.key == DEVICES else "", "memory", "plan")]
    for point in curve.points:
        if point.best is None or point.rate is None:
            rows.append((point.text, "", "", "", "", point.cause))
            continue
        efficiency = curve.efficiency(point)
        rows.append((
            point.text,
            format_step_seconds(point.best.seconds),
            format_si(point.rate),
            "" if efficiency is None else format_percent(efficiency),
            format_bytes(point.best.memory.total),
            plan_words(point.best.plan),
        ))  # fmt: skip
    return rows
