"""Page: a run, or a comparison of several, as one HTML file that needs no other.

figure  a number by which a run is judged
Law: what a run has not recorded has no card; a page is written whole, and shows the runs as their files are now. In a
comparison every row has a value of each run, or a dash; a value is called the best only where it is known which
direction is better, and where runs differ.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fourfold.axes.pipeline.rules.schedules import ASYNCHRONOUS
from fourfold.environment.atomic_file import write_atomically
from fourfold.report import charts
from fourfold.report.cards import (
    RESTART,
    SKIPPED,
    checkpoints_card,
    data_card,
    faults_card,
    format_utilization,
    memory_card,
    segments_card,
    total_window,
)
from fourfold.report.html_page import (
    UNKNOWN,
    format_value,
    render_card,
    render_page,
    render_row,
    render_text,
    render_values,
)
from fourfold.report.run_record import RunRecord, read_run
from fourfold.report.step_timeline import action_card, prediction_card, step_card, undrained_step_card
from fourfold.trace.trace_file import Trace
from fourfold.trainer.progress import format_duration
from fourfold.words.units import format_bytes, format_si

# ---- key figures -----------------------------------------------------------------------------------------------------


Direction = Literal["lower", "higher", ""]

NUM_LAST_STEPS = 20  # that the training loss is the mean of, as on the terminal
# Words in the name of a measure.
LOWER = {"loss", "bits", "perplexity", "ppl", "error", "nll", "wer", "cer", "mae", "mse", "rmse", "distance", "fid"}
HIGHER = {"accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "iou", "miou", "map", "psnr"}
HIGHER |= {"ssim", "r2", "score"}


class Figure(NamedTuple):
    """A number of a run. `value` is None where it is not a number; `note` says more of it in a few words."""

    name: str
    text: str
    value: float | None = None
    better: Direction = ""
    note: str = ""


def better_direction(measure: str) -> Direction:
    """Which values of a measure are better, judged by its name; "" if the name does not say."""
    words = set(re.split(r"[^a-z0-9]+", measure.lower()))
    lower, higher = bool(words & LOWER), bool(words & HIGHER)
    return "" if lower == higher else "lower" if lower else "higher"


def key_figures(record: RunRecord) -> list[Figure]:
    """The key figures of a run."""
    figures = [_measure_figure(record, name) for name in (record.evaluations[-1][1] if record.evaluations else {})]
    losses = [line["loss"] for line in record.steps[-NUM_LAST_STEPS:] if line["loss"] is not None]
    if losses:
        loss = sum(losses) / len(losses)
        figures.append(Figure("training loss", f"{loss:.4f}", loss, "lower"))
    rate, waiting = record.units_per_second, 100 * record.waiting_fraction()
    recent = f"last {NUM_LAST_STEPS} steps {100 * record.waiting_fraction(last=NUM_LAST_STEPS):.0f} %"
    segments = f"{len(record.segments)} segments" if len(record.segments) > 1 else ""
    figures += [
        Figure("steps", f"{len(record.steps):,}"),
        Figure(f"{record.unit} a second", format_si(rate), rate, "higher"),
        Figure("time", format_duration(record.total_seconds), record.total_seconds, note=segments),
        Figure("waiting", f"{waiting:.1f} %", waiting, "lower", note=recent),
        *_utilization_figures(record),
        Figure("sent a step by rank 0", format_bytes(record.mean_sent_bytes), record.mean_sent_bytes, "lower"),
    ]
    if record.memory is not None and (peak := record.memory.largest_peak_bytes) is not None:
        figures.append(Figure("peak memory of a rank", format_bytes(peak), peak, "lower"))
    return figures


def _utilization_figures(record: RunRecord) -> list[Figure]:
    value = total_window(record.data).utilization
    return [] if value is None else [Figure("utilization", format_utilization(value), value, "higher")]


def best_evaluations(record: RunRecord) -> list[Figure]:
    """The best value of each measure whose better direction is known."""
    figures = []
    for name in record.evaluations[-1][1] if record.evaluations else ():
        if (best := _best(record, name)) is not None:
            step, value = best
            shown = f"best {_measure_name(name)}"
            figures.append(Figure(shown, format_measure(value), value, better_direction(name), f"step {step:,}"))
    return figures


def best_indices(figures: Sequence[Figure | None]) -> set[int]:
    """Which of several runs have the best value of one figure; none if all are equal, or it cannot be said."""
    values = {
        index: each.value
        for index, each in enumerate(figures)
        if each is not None and each.better and each.value is not None and math.isfinite(each.value)
    }
    texts = {each.text for index, each in enumerate(figures) if index in values and each is not None}
    if len(texts) < 2:
        return set()
    (better,) = {each.better for index, each in enumerate(figures) if index in values and each is not None}
    best = (min if better == "lower" else max)(values.values())
    return {index for index, value in values.items() if value == best}


def format_measure(value: float | None) -> str:
    """A value of an evaluation. JSON has no NaN: the log says null."""
    if value is None or not math.isfinite(value):
        return "nan"
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4e}"


def _measure_figure(record: RunRecord, name: str) -> Figure:
    value = record.evaluations[-1][1][name]
    best = _best(record, name)
    note = f"best {format_measure(best[1])} at step {best[0]:,}" if best is not None and best[1] != value else ""
    return Figure(_measure_name(name), format_measure(value), value, better_direction(name), note)


def _best(record: RunRecord, name: str) -> tuple[int, float] | None:
    """The best value of a measure, as (step, value)."""
    better = better_direction(name)
    values = [(step, each[name]) for step, each in record.evaluations if each.get(name) is not None]
    finite = [(step, value) for step, value in values if value is not None and math.isfinite(value)]
    if not better or not finite:
        return None
    return (min if better == "lower" else max)(finite, key=lambda pair: pair[1])


def _measure_name(name: str) -> str:
    return f"validation {name}" if name == "loss" else name


# ---- one run ---------------------------------------------------------------------------------------------------------


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
        render_card(faults_card(record.faults, record.resumed_steps), wide=True),
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
        render_card(checkpoints_card(record.checkpoints)),
        segments_card(record.segments),
    )
    return f'<div class="stack">{saves}{render_card(times)}</div>' if times else saves


def _describe_ranks(record: RunRecord) -> str:
    size = 1
    for axis in ("pp", "dp", "cp", "tp"):
        size *= record.plan.get(axis, 1)
    return "1 process" if size == 1 else f"{size} ranks"


# ---- several runs ----------------------------------------------------------------------------------------------------


def render_comparison(records: Sequence[RunRecord]) -> str:
    """The page that compares several runs."""
    cards = [
        render_card(_differing_settings(records), wide=True),
        render_card(_final_values(records), wide=True),
        render_card(charts.loss_chart(records)),
        render_card(charts.throughput_chart(records)),
        *map(render_card, charts.measure_charts(records)),
        render_card(charts.lr_chart(records)),
        render_card(charts.grad_norm_chart(records)),
    ]
    title = " · ".join(record.name for record in records)
    return render_page(title, f"{len(records)} runs compared", f'<div class="cards">{"".join(cards)}</div>')


def _final_values(records: Sequence[RunRecord]) -> str:
    tables = [_figures(record) for record in records]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for name in names:
        figures = [table.get(name) for table in tables]
        best = best_indices(figures)
        cells = [_figure_cell(each, is_best=index in best) for index, each in enumerate(figures)]
        rows.append(f"<tr><td>{render_text(name)}</td>{''.join(cells)}</tr>")
    note = "★ marks the best value of a row, if the name of the metric tells whether lower or higher is better."
    return f'<h2>Final values</h2>{_table(records, rows, style="runs finals")}<p class="note">{note}</p>'


def _figure_cell(figure: Figure | None, *, is_best: bool) -> str:
    text = UNKNOWN if figure is None else f"{figure.text} ({figure.note})" if figure.note else figure.text
    style = ' class="best"' if is_best else ""
    return f"<td{style}>{render_text(text)}</td>"


def _figures(record: RunRecord) -> dict[str, Figure]:
    """The final figures by name, those of evaluations without their best values, which have rows of their own."""
    names = set(record.evaluations[-1][1] if record.evaluations else ())
    finals = [
        each._replace(note="") if each.name.removeprefix("validation ") in names else each
        for each in key_figures(record)
    ]
    counts = record.faults.count(RESTART), record.faults.count(SKIPPED)
    lost = Figure("restarts / skipped steps", f"{counts[0]:,} / {counts[1]:,}")
    return {each.name: each for each in (*finals, *best_evaluations(record), lost)}


def _differing_settings(records: Sequence[RunRecord]) -> str:
    tables = [_all_settings(record) for record in records]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for name in names:
        texts = [format_value(table[name]) if name in table else UNKNOWN for table in tables]
        if len(set(texts)) > 1:
            rows.append(render_row([name, *texts]))
    table = _table(records, rows) if rows else "<p>Nothing.</p>"
    return f"<h2>What differs in plan and settings</h2>{table}"


def _all_settings(record: RunRecord) -> Mapping[str, Any]:
    """Settings, plan and environment by name; a name of several has the section before it."""
    found: dict[str, Any] = {}
    for section, values in record.sections.items():
        for name, value in values.items():
            found[name if name not in found else f"{section}: {name}"] = value
    return found


def _table(records: Sequence[RunRecord], rows: Sequence[str], *, style: str = "runs") -> str:
    head = render_row(["", *(record.name for record in records)], "th")
    return f'<div class="scroll"><table class="{style}">{head}{"".join(rows)}</table></div>'
