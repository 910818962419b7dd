"""Charts: the curves of a run, or of several in one frame: loss, measures of evaluations, learning rate, gradient norm.

measure  a value of an evaluation: the loss, or what the task's `evaluate` returns
Law: runs whose values cannot be compared have separate drawings; a value that is not finite leaves a gap.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fourfold.report import cards
from fourfold.report.html_page import render_text
from fourfold.report.run_record import RunRecord
from fourfold.report.svg import Point, Series, line_figure
from fourfold.words.terminal_text import escape_controls

MAX_POINTS = 500  # of a curve: no drawing shows more
EMA_PREFIX = "ema "  # of a measure with the averaged weights


def loss_chart(records: Sequence[RunRecord]) -> str:
    """The loss, smoothed, and the validation loss; for one run also single steps, faults and checkpoints."""
    is_one = len(records) == 1
    series, dots = [], []
    for index, record in enumerate(records):
        losses = _step_points(record.steps, "loss")
        name = escape_controls(record.name)
        if is_one:
            series.append(Series("each step", downsample(losses, _first), index, "faint"))
        series.append(Series("training" if is_one else name, downsample(smooth(losses), _first), index))
        for number, measure in enumerate(["loss", f"{EMA_PREFIX}loss"] if is_one else ["loss"]):
            kind = f"validation{', ema' * number}"
            colour, points = number + 1 if is_one else index, evaluation_points(record, measure)
            dots.append(Series(kind if is_one else f"{name}, {kind}", points, colour, "dots", in_legend=is_one))
    marks, note = [], "Dots: validation."
    if is_one:
        (one,) = records
        marks = [
            *cards.fault_marks(one.faults.faults, last_step=one.last_step),
            cards.checkpoint_ticks(one.checkpoints, last_step=one.last_step),
        ]
        note = cards.no_faults_note(one.faults, one.resumed_steps)
    drawing = line_figure([*marks, *series, *dots], x="step", y="loss", title="Loss")
    return f"<h2>Loss</h2>{drawing or '<p>No step has ended.</p>'}{_note(note)}"


def measure_charts(records: Sequence[RunRecord]) -> list[str]:
    """A chart for each measure but the loss, if a run has more than one value of it."""
    names = dict.fromkeys(
        name.removeprefix(EMA_PREFIX) for record in records for _, measures in record.evaluations for name in measures
    )
    charts = []
    for measure in names:
        series = []
        for index, record in enumerate(records):
            for number, prefix in enumerate(["", EMA_PREFIX]):
                name = f"{prefix}{measure}" if len(records) == 1 else f"{record.name}{', ema' * number}"
                colour = number if len(records) == 1 else index
                # Several runs with two curves each would be hard to read.
                if not number or len(records) == 1:
                    points = evaluation_points(record, f"{prefix}{measure}")
                    series.append(Series(escape_controls(name), points, colour, "linked"))
        if measure != "loss" and any(len(each.points) > 1 for each in series):
            title = escape_controls(measure)
            drawing = line_figure(series, x="step", y=title, title=title, legend=len(records) > 1)
            charts.append(f"<h2>{render_text(_capitalized(measure))}</h2>{drawing}")
    return charts


def lr_chart(records: Sequence[RunRecord]) -> str:
    """The learning rate of the optimizer's first group; "" if the log has none."""
    series = _record_series(records, "lr", "learning rate")
    drawing = line_figure(series, x="step", y="learning rate", title="Learning rate", legend=len(records) > 1)
    return f"<h2>Learning rate</h2>{drawing}" if drawing else ""


def grad_norm_chart(records: Sequence[RunRecord]) -> str:
    """The norm of the gradient before clipping, smoothed; "" if no step has measured it."""
    is_one = len(records) == 1
    series = []
    if is_one:
        series.append(Series("each step", downsample(_step_points(records[0].steps, "grad_norm"), _first), 0, "faint"))
    series += _record_series(records, "grad_norm", "mean", change=smooth)
    drawing = line_figure(series, x="step", y="norm", title="Gradient norm", legend=not is_one)
    clip = records[0].settings.get("clip")
    note = f"Before clipping at {clip:g}." if is_one and isinstance(clip, int | float) else "Before clipping."
    return f"<h2>Gradient norm</h2>{drawing}{_note(note)}" if drawing else ""


def throughput_chart(records: Sequence[RunRecord]) -> str:
    """Throughput over the training time. One drawing per unit: samples and tokens are not comparable."""
    by_unit: dict[str, list[Series]] = {}
    for index, record in enumerate(records):
        by_unit.setdefault(record.unit, []).append(_throughput_series(record, colour=index))
    drawings = [_throughput_drawing(series, unit, legend=len(records) > 1) for unit, series in by_unit.items()]
    return f"<h2>Throughput</h2>{''.join(drawings) or '<p>Too few steps.</p>'}"


def evaluation_points(record: RunRecord, measure: str) -> list[Point]:
    """The finite values of a measure, by step."""
    values = ((step, measures.get(measure)) for step, measures in record.evaluations)
    found = {step: value for step, value in values if value is not None and math.isfinite(value)}
    return [(float(step), found[step]) for step in sorted(found)]


def _step_points(steps: Sequence[Mapping[str, Any]], field: str) -> list[Point]:
    return [(line["step"], value) for line in steps if (value := line.get(field)) is not None and math.isfinite(value)]


def _record_series(
    records: Sequence[RunRecord],
    field: str,
    name: str,
    *,
    change: Callable[[Sequence[Point]], Sequence[Point]] = lambda points: points,
) -> list[Series]:
    """A curve per run of a field of its steps; `name` is that of the only one."""
    return [
        Series(
            name if len(records) == 1 else escape_controls(record.name),
            downsample(change(_step_points(record.steps, field)), _first),
            index,
        )
        for index, record in enumerate(records)
    ]


def _throughput_series(record: RunRecord, *, colour: int) -> Series:
    points, elapsed = [], 0.0
    for number, line in enumerate(record.steps):
        elapsed += line["seconds"]
        points.append((elapsed, record.step_units(number) / max(line["seconds"], 1e-9)))
    # The first step allocates, so it is left out.
    return Series(escape_controls(record.name), downsample(smooth(points[1:]), _mean), colour)


def _throughput_drawing(series: Sequence[Series], unit: str, *, legend: bool) -> str:
    """The drawing for one unit; "" if no run has enough steps."""
    factor, prefix = _unit_prefix(max((y for each in series for _, y in each.points), default=0.0))
    scaled_down = [each._replace(points=[(x, y / factor) for x, y in each.points]) for each in series]
    if not legend:
        scaled_down = [each._replace(name="throughput") for each in scaled_down]
    y = f"{prefix}{unit} a second"
    title = f"Throughput, {unit}"
    return line_figure(scaled_down, x="training time, s", y=y, title=title, from_zero=True, legend=legend)


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving means over a fiftieth of the points, each at the last point of its window."""
    width = max(1, len(points) // 50)
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    head = [(x, sums[index] / index) for index, (x, _) in enumerate(points[:width], 1)]
    windows = zip(points[width:], sums[1:], sums[width + 1 :], strict=False)
    return head + [(x, (stop - start) / width) for (x, _), start, stop in windows]


def downsample(points: Sequence[Point], pick: Callable[[Sequence[Point]], Point]) -> list[Point]:
    """At most about MAX_POINTS points, always with the last one. `pick` makes one point of several."""
    stride = -(-len(points) // MAX_POINTS) or 1
    picked = [pick(points[index : index + stride]) for index in range(0, len(points), stride)]
    return picked if not points or picked[-1] == points[-1] else [*picked, points[-1]]


def _first(points: Sequence[Point]) -> Point:
    return points[0]


def _mean(points: Sequence[Point]) -> Point:
    return points[-1][0], sum(y for _, y in points) / len(points)


def _unit_prefix(most: float) -> tuple[float, str]:
    return (1e6, "million ") if most >= 2e6 else (1e3, "thousand ") if most >= 2e3 else (1.0, "")


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _note(text: str) -> str:
    return f'<p class="note">{render_text(text)}</p>' if text else ""
