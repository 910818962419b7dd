"""Page: a run, or a comparison of several, as one HTML file that needs no other.

Law: what the run has not recorded has no card; a page is written whole, and shows the run as its files are now.
"""

from collections.abc import Sequence
from pathlib import Path

from fourfold.environment.atomic_file import write_atomically
from fourfold.plan.pipeline.schedules import ASYNCHRONOUS
from fourfold.plan.trace_file import Trace
from fourfold.report import charts, checkpoint_card, faults, segments
from fourfold.report.comparison import render_comparison
from fourfold.report.data_card import data_card
from fourfold.report.html_page import render_card, render_page, render_values
from fourfold.report.html_table import render_text
from fourfold.report.key_figures import key_figures
from fourfold.report.memory_card import memory_card
from fourfold.report.prediction_card import prediction_card
from fourfold.report.run_record import RunRecord, read_run
from fourfold.report.step_timeline import action_card, step_card, undrained_step_card

REPORT_FILE = "report.html"
MAX_COLUMNS = 9  # of key figures


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
    write_atomically(path, (render_run(records[0]) if one else render_comparison(records)).encode())
    return path


def render_run(record: RunRecord) -> str:
    """The page of one run."""
    records = [record]
    trace = record.trace if record.trace is not None and record.trace.events else None
    untraced = "<h2>Time by action</h2><p>No step of this run was traced.</p>"
    cards = [
        render_card(charts.loss_chart(records)),
        render_card(charts.throughput_chart(records)),
        *map(render_card, charts.measure_charts(records)),
        render_card(charts.lr_chart(records)),
        render_card(charts.grad_norm_chart(records)),
        render_card(memory_card(record.memory)),
        render_card(action_card(trace) if trace else untraced),
        _checkpoints_and_segments(record),
        render_card(data_card(record.data), wide=True),
        render_card(faults.faults_card(record.faults, record.resumed_steps), wide=True),
        render_card(prediction_card(record.prediction, trace, [line["seconds"] for line in record.steps]), wide=True),
        render_card(_step_card(record, trace), wide=True) if trace else "",
        *_description(record),
    ]
    body = f'{render_figures(record)}<div class="cards">{"".join(cards)}</div>'
    return render_page(record.name, describe_run(record, is_open=record.finish_line is None), body)


def render_figures(record: RunRecord) -> str:
    """The key figures, as tiles."""
    figures = key_figures(record)
    labels = [", ".join(filter(None, (each.name, each.note))) for each in figures]
    tiles = [
        f"<div><b>{render_text(each.text)}</b><span>{render_text(label)}</span></div>"
        for each, label in zip(figures, labels, strict=True)
    ]
    num_rows = -(-len(tiles) // MAX_COLUMNS)
    return f'<div class="figures" style="--columns: {-(-len(tiles) // num_rows)}">{"".join(tiles)}</div>'


def describe_run(record: RunRecord, *, is_open: bool) -> str:
    """The line under the name of a run: its task, its ranks, its transport."""
    settings = record.settings
    parts = [settings.get("task", "run"), _describe_ranks(record), settings.get("transport", "")]
    return " · ".join(str(part) for part in [*parts, *(["not finished"] if is_open else [])] if part)


def _description(record: RunRecord) -> list[str]:
    """The cards of what the run was made of."""
    sections = record.sections
    settings = render_values("Settings", sections["settings"])
    if sections["task"]:
        settings += render_values("Arguments of the task", sections["task"], tag="h3")
    # The plan is long; the settings and the environment are short, and share the column next to it.
    short_cards = f"{render_card(settings)}{render_card(render_values('Environment', sections['environment']))}"
    return [render_card(render_values("Plan", sections["plan"])), f'<div class="stack">{short_cards}</div>']


def _step_card(record: RunRecord, trace: Trace) -> str:
    is_asynchronous = record.plan.get("pp", 1) > 1 and record.plan.get("schedule") in ASYNCHRONOUS
    return undrained_step_card(trace) if is_asynchronous else step_card(trace)


def _checkpoints_and_segments(record: RunRecord) -> str:
    saves, times = (
        render_card(checkpoint_card.checkpoints_card(record.checkpoints)),
        segments.segments_card(record.segments),
    )
    return f'<div class="stack">{saves}{render_card(times)}</div>' if times else saves


def _describe_ranks(record: RunRecord) -> str:
    size = 1
    for axis in ("pp", "dp", "sp", "tp"):
        size *= record.plan.get(axis, 1)
    return "1 process" if size == 1 else f"{size} ranks"
