"""Page: a run, or a comparison of several, as one HTML file that needs no other.

card  a part of the page: a heading, and a drawing or a table
Law: everything that comes from a run is escaped; the page loads nothing and is well-formed XML.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fourfold.report import checkpoint_card, faults, segments
from fourfold.report.html_table import render_row
from fourfold.report.run_record import RunRecord, read_run
from fourfold.report.step_timeline import action_card, step_card
from fourfold.report.style import CSS
from fourfold.report.svg import Point, Series, line_chart
from fourfold.trainer.progress import format_duration
from fourfold.words.units import format_bytes, format_si

REPORT_FILE = "report.html"
MAX_POINTS = 500  # of a curve: no drawing shows more
ENVIRONMENT_KEYS = ("transport", "versions", "machine", "cores")


def write_report(paths: Sequence[Path]) -> Path:
    """Write the report of the runs in these folders; returns its path.

    The page of one run goes into its folder, that of several next to the first run's folder. Raises ReportError if a
    run cannot be read.
    """
    records = [read_run(path) for path in paths]
    one = len(records) == 1
    path = (
        records[0].path / REPORT_FILE if one else records[0].path.parent / f"{'+'.join(r.name for r in records)}.html"
    )
    path.write_text(render_run(records[0]) if one else render_comparison(records), encoding="utf-8")
    return path


def render_run(record: RunRecord) -> str:
    """The page of one run."""
    cards = [_card(loss_chart([record])), _card(throughput_chart([record]))]
    trace = record.trace if record.trace is not None and record.trace.events else None
    untraced = "<h2>Time by action</h2><p>No step of this run was traced.</p>"
    cards += [_card(action_card(trace) if trace else untraced), _checkpoints_and_segments(record)]
    if faults_html := faults.faults_card(record.faults, record.resumed_steps):
        cards.append(_card(faults_html, wide=True))
    if trace:
        cards.append(_card(step_card(trace), wide=True))
    # The plan is long; the settings and the environment are short, and share the column next to it.
    short_cards = f"{_card(_settings(record))}{_card(_key_value_table('Environment', _environment(record)))}"
    cards += [_card(_key_value_table("Plan", _plan_fields(record))), f'<div class="stack">{short_cards}</div>']
    ended = "" if record.finish_line else " · not finished"
    settings = record.settings
    subtitle = f"{settings.get('task', 'run')} · {_describe_ranks(record)} · {settings.get('transport', '')}{ended}"
    figures = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in key_figures(record)
    )
    body = f'<div class="figures">{figures}</div><div class="cards">{"".join(cards)}</div>'
    return _html_page(record.name, subtitle, body)


def _checkpoints_and_segments(record: RunRecord) -> str:
    saves, times = _card(checkpoint_card.checkpoints_card(record.checkpoints)), segments.segments_card(record.segments)
    return f'<div class="stack">{saves}{_card(times)}</div>' if times else saves


def render_comparison(records: Sequence[RunRecord]) -> str:
    """The page that compares several runs."""
    tables = [{**dict(key_figures(record)), **_fault_counts(record)} for record in records]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = [render_row(["", *(record.name for record in records)], "th")]
    rows += [render_row([name, *(table.get(name, "–") for table in tables)]) for name in names]
    settings = [{**_plan_fields(record), **_flatten(record.settings)} for record in records]
    names = list(dict.fromkeys(name for each in settings for name in each))
    differing = [name for name in names if len({str(each.get(name, "–")) for each in settings}) > 1]
    rows_of_settings = rows[:1]
    rows_of_settings += [
        render_row([name, *(_format_value(each.get(name, "–")) for each in settings)]) for name in differing
    ]
    differ = f"<table>{''.join(rows_of_settings)}</table>" if differing else "<p>Nothing.</p>"
    cards = [
        _card(f'<h2>Key figures</h2><div class="scroll"><table>{"".join(rows)}</table></div>', wide=True),
        _card(loss_chart(records)),
        _card(throughput_chart(records)),
        _card(f'<h2>What differs in plan and settings</h2><div class="scroll">{differ}</div>', wide=True),
    ]
    title = " · ".join(record.name for record in records)
    return _html_page(title, f"{len(records)} runs compared", f'<div class="cards">{"".join(cards)}</div>')


def key_figures(record: RunRecord) -> list[tuple[str, str]]:
    """The key figures, as (name, text)."""
    figures = []
    if record.evaluations:
        for name, value in record.evaluations[-1][1].items():
            text = "nan" if value is None else f"{value:.4f}"  # JSON has no NaN: the log says null
            figures.append((f"validation {name}" if name == "loss" else name, text))
    losses = [line["loss"] for line in record.steps[-20:] if line["loss"] is not None]
    if losses:
        figures.append(("training loss", f"{sum(losses) / len(losses):.4f}"))
    return [
        *figures,
        ("steps", f"{len(record.steps):,}"),
        (f"{record.unit} a second", format_si(record.units_per_second)),
        (
            "time" if len(record.segments) == 1 else f"time, {len(record.segments)} attempts",
            format_duration(record.total_seconds),
        ),
        ("of it waiting", f"{100 * record.waiting_fraction:.1f} %"),
        ("sent a step by rank 0", format_bytes(record.mean_sent_bytes)),
    ]


def _fault_counts(record: RunRecord) -> dict[str, str]:
    counts = record.faults.count(faults.RESTART), record.faults.count(faults.SKIPPED)
    return {"restarts / skipped steps": f"{counts[0]:,} / {counts[1]:,}"}


def loss_chart(records: Sequence[RunRecord]) -> str:
    """The loss, smoothed, and the validation loss; for one run also single steps, faults and checkpoints."""
    series, dots = [], []
    for index, record in enumerate(records):
        losses = [(line["step"], line["loss"]) for line in record.steps if line["loss"] is not None]
        name = "training" if len(records) == 1 else record.name
        if len(records) == 1:
            series.append(Series("each step", downsample(losses, _first), index, "faint"))
        series.append(Series(name, downsample(smooth(losses), _first), index))
        valid = [(step, loss) for step, measures in record.evaluations if (loss := measures.get("loss")) is not None]
        dots.append(Series("validation" if len(records) == 1 else "", valid, 1 if len(records) == 1 else index, "dots"))
    marks, note = [], "Dots: validation."
    if len(records) == 1:
        (one,) = records
        marks = [
            *faults.fault_marks(one.faults.faults, last_step=one.last_step),
            checkpoint_card.checkpoint_ticks(one.checkpoints, last_step=one.last_step),
        ]
        note = faults.no_faults_note(one.faults, one.resumed_steps)
    drawing = line_chart([*marks, *series, *dots], x="step", y="loss", title="Loss")
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<h2>Loss</h2>{drawing or '<p>No step has ended.</p>'}{note}"


def throughput_chart(records: Sequence[RunRecord]) -> str:
    """Throughput over the time in steps. One drawing per unit: samples and tokens are not comparable."""
    by_unit: dict[str, list[Series]] = {}
    for index, record in enumerate(records):
        by_unit.setdefault(record.unit, []).append(_throughput_series(record, colour=index))
    drawings = [_throughput_drawing(series, unit, legend=len(records) > 1) for unit, series in by_unit.items()]
    return f"<h2>Throughput</h2>{''.join(drawings) or '<p>Too few steps.</p>'}"


def _throughput_series(record: RunRecord, *, colour: int) -> Series:
    points, elapsed = [], 0.0
    for number, line in enumerate(record.steps):
        elapsed += line["seconds"]
        points.append((elapsed, record.step_units(number) / max(line["seconds"], 1e-9)))
    # The first step allocates, so it is left out.
    return Series(record.name, downsample(smooth(points[1:]), _mean), colour)


def _throughput_drawing(series: Sequence[Series], unit: str, *, legend: bool) -> str:
    """The drawing for one unit; "" if no run has enough steps."""
    factor, prefix = _unit_prefix(max((y for each in series for _, y in each.points), default=0.0))
    scaled_down = [each._replace(points=[(x, y / factor) for x, y in each.points]) for each in series]
    title = f"Throughput, {unit}"
    y = f"{prefix}{unit} a second"
    return line_chart(scaled_down, x="time in steps, s", y=y, title=title, from_zero=True, legend=legend)


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving means over a fiftieth of the points, each at the last point of its window."""
    width = max(1, len(points) // 50)
    result, total = [], 0.0
    for index, (x, y) in enumerate(points):
        total += y - (points[index - width][1] if index >= width else 0.0)
        result.append((x, total / min(index + 1, width)))
    return result


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


def _describe_ranks(record: RunRecord) -> str:
    size = 1
    for axis in ("pp", "dp", "sp", "tp"):
        size *= record.plan.get(axis, 1)
    return "1 process" if size == 1 else f"{size} ranks"


def _plan_fields(record: RunRecord) -> dict[str, Any]:
    return {name: value for name, value in record.plan.items() if name != "version"}


def _settings(record: RunRecord) -> str:
    chosen = {name: value for name, value in record.settings.items() if name not in ENVIRONMENT_KEYS}
    return _key_value_table("Settings", chosen)


def _environment(record: RunRecord) -> dict[str, Any]:
    return _flatten({name: record.settings[name] for name in ENVIRONMENT_KEYS if name in record.settings})


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with nested tables such as the versions replaced by their entries."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _key_value_table(title: str, values: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><th>{escape(name)}</th><td>{escape(_format_value(value))}</td></tr>" for name, value in values.items()
    )
    return f'<h2>{title}</h2><table class="words">{"".join(rows)}</table>'


def _format_value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _card(content: str, *, wide: bool = False) -> str:
    return f'<section class="card{" wide" if wide else ""}">{content}</section>'


def _html_page(title: str, subtitle: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)} · Fourfold</title><style>{CSS}</style></head>\n"
        f'<body><main><h1>{escape(title)}</h1><p class="under">{escape(subtitle)}</p>{body}</main></body></html>\n'
    )
