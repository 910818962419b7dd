"""Feed bench page: emulated trainings as one HTML file that needs no other.

Law: the page has every figure of the text, and says in which window they were measured.
"""

from collections.abc import Sequence

from fourfold.report.html_page import render_card, render_page, render_row, render_table, render_text
from fourfold.report.svg import Bar, Series, bar_chart, line_figure
from fourfold.words.units import format_bytes_per_second, format_si
from fourfold_bench.result import (
    COLUMNS,
    RULES,
    UNKNOWN,
    WINDOW_TEXT,
    Result,
    epoch_rows,
    histogram,
    name_of,
    percent,
    summary_rows,
)

PAGE_TITLE = "Feed bench"


def render_feed_bench(results: Sequence[Result]) -> str:
    """The page of one or several emulated trainings."""
    cards = [*map(render_card, _sweep_cards(results))] if len(results) > 1 else []
    for result in results:
        cards += [
            render_card(_epochs_card(result), wide=True),
            render_card(_waits_card(result)),
            render_card(_storage_card(result)),
        ]
    figures = _tiles(results[0]) if len(results) == 1 else ""
    first = results[0]
    under = f"{name_of(first)} · {first.workload.format}" if len(results) == 1 else f"{len(results)} emulated trainings"
    return render_page(PAGE_TITLE, under, f'{figures}<div class="cards">{"".join(cards)}</div>')


def _tiles(result: Result) -> str:
    total = result.total
    rate, read = total.samples_per_second, total.bytes_per_second
    verdict = UNKNOWN if result.passes is None else "pass" if result.passes else "fail"
    tiles = [
        (percent(total.utilization), "accelerator utilization"),
        (verdict, f"required: {percent(result.workload.threshold)}"),
        (UNKNOWN if rate is None else format_si(rate), "samples a second"),
        (UNKNOWN if read is None else format_bytes_per_second(read), "read from storage"),
        (format_bytes_per_second(result.ceiling), "ceiling of this storage"),
        (f"{result.fed_accelerators:,}", "accelerators that it can feed"),
    ]
    cells = (f"<div><b>{render_text(value)}</b><span>{render_text(name)}</span></div>" for value, name in tiles)
    return f'<div class="figures" style="--columns: {len(tiles)}">{"".join(cells)}</div>'


def _epochs_card(result: Result) -> str:
    rows = [render_row(line) for line in epoch_rows(result)]
    notes = [f"Window: {WINDOW_TEXT}.", f"Page cache: {result.cache}."]
    notes += [f"Scaled: {'; '.join(result.scaled)}."] if result.scaled else []
    note = f'<p class="note">{render_text(" ".join([*notes, RULES]))}</p>'
    return f"<h2>{render_text(name_of(result))}</h2>{render_table(COLUMNS, rows, style='memory')}{note}"


def _waits_card(result: Result) -> str:
    rows = [Bar(label, count, f"{count:,}", "data") for label, count in histogram(result.waits)]
    who = f"{result.accelerators} accelerators" if result.accelerators > 1 else "one accelerator"
    note = f"{len(result.waits):,} waits of {who}, in the same window."
    return f'<h2>Waits for a batch</h2>{bar_chart(rows, title="Waits for a batch")}<p class="note">{note}</p>'


def _storage_card(result: Result) -> str:
    rows = (f"<tr><th>{render_text(name)}</th><td>{render_text(text)}</td></tr>" for name, text in summary_rows(result))
    return f'<h2>Storage</h2><table class="words">{"".join(rows)}</table>'


def _sweep_cards(results: Sequence[Result]) -> tuple[str, str]:
    """Utilization by number of accelerators, a curve for each workload; and the same as a table."""
    names = list(dict.fromkeys(each.label for each in results))
    series = []
    for number, name in enumerate(names):
        own = [each for each in results if each.label == name and each.utilization is not None]
        points = [(float(each.accelerators), 100 * (each.utilization or 0.0)) for each in own]
        series.append(Series(name, points, number, "linked"))
    title = "Utilization by number of accelerators"
    drawing = line_figure(series, x="accelerators", y="utilization, %", title=title, from_zero=True, legend=True)
    columns = ("accelerators", *names)
    found = {(each.label, each.accelerators): percent(each.utilization) for each in results}
    sizes = dict.fromkeys(each.accelerators for each in results)
    rows = [render_row([str(size), *(found.get((name, size), UNKNOWN) for name in names)]) for size in sizes]
    return f"<h2>{title}</h2>{drawing}", f"<h2>Utilization</h2>{render_table(columns, rows, style='memory')}"
