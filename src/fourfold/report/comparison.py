"""Comparison: the page of several runs: what differs in plan and settings, the final values, a curve per run.

Law: every row has a value of each run, or a dash; the best value of a row is marked where it is known which is better.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.report import charts, faults
from fourfold.report.html_page import format_value, render_card, render_page
from fourfold.report.html_table import UNKNOWN, render_row, render_text
from fourfold.report.key_figures import Figure, best_evaluations, best_indices, key_figures
from fourfold.report.run_record import RunRecord


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
    counts = record.faults.count(faults.RESTART), record.faults.count(faults.SKIPPED)
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
