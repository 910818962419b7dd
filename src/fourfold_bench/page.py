"""Feed bench page: emulated trainings as one HTML file that needs no other.

Law: the page has every figure of the text, and says in which window they were measured.
"""

from collections.abc import Sequence
from typing import Any

from fourfold.report.document import Card, Series, bars, card, curves, document, note, table
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


def describe_feed_bench(results: Sequence[Result]) -> dict[str, Any]:
    """The data of the page of one or several emulated trainings."""
    cards = [*_sweep_cards(results)] if len(results) > 1 else []
    for result in results:
        cards += [
            _epochs_card(result),
            _waits_card(result),
            card("Storage", table((), summary_rows(result), style="values")),
        ]
    first = results[0]
    under = f"{name_of(first)} · {first.workload.format}" if len(results) == 1 else f"{len(results)} emulated trainings"
    return document(PAGE_TITLE, under, cards, figures=_tiles(first) if len(results) == 1 else ())


def _tiles(result: Result) -> list[tuple[str, str]]:
    total = result.total
    rate, read = total.samples_per_second, total.bytes_per_second
    verdict = UNKNOWN if result.passes is None else "pass" if result.passes else "fail"
    return [
        (percent(total.utilization), "accelerator utilization"),
        (verdict, f"required: {percent(result.workload.threshold)}"),
        (UNKNOWN if rate is None else format_si(rate), "samples a second"),
        (UNKNOWN if read is None else format_bytes_per_second(read), "read from storage"),
        (format_bytes_per_second(result.ceiling), "ceiling of this storage"),
        (f"{result.fed_accelerators:,}", "accelerators that it can feed"),
    ]


def _epochs_card(result: Result) -> Card:
    notes = [f"Window: {WINDOW_TEXT}.", f"Page cache: {result.cache}."]
    notes += [f"Scaled: {'; '.join(result.scaled)}."] if result.scaled else []
    return card(name_of(result), table(COLUMNS, epoch_rows(result)), note(" ".join([*notes, RULES])), wide=True)


def _waits_card(result: Result) -> Card:
    rows = [(label, float(count), f"{count:,}", "data") for label, count in histogram(result.waits)]
    who = f"{result.accelerators} accelerators" if result.accelerators > 1 else "one accelerator"
    under = f"{len(result.waits):,} waits of {who}, in the same window."
    return card("Waits for a batch", bars(rows, title="Waits for a batch"), note(under))


def _sweep_cards(results: Sequence[Result]) -> tuple[Card, Card]:
    """Utilization by number of accelerators, a curve for each workload; and the same as a table."""
    names = list(dict.fromkeys(each.label for each in results))
    series = []
    for number, name in enumerate(names):
        own = [each for each in results if each.label == name and each.utilization is not None]
        points = [(float(each.accelerators), 100 * (each.utilization or 0.0)) for each in own]
        series.append(Series(name, points, number, "linked"))
    title = "Utilization by number of accelerators"
    drawing = curves(series, x="accelerators", y="utilization, %", title=title, from_zero=True, legend=True)
    found = {(each.label, each.accelerators): percent(each.utilization) for each in results}
    sizes = dict.fromkeys(each.accelerators for each in results)
    rows = [[str(size), *(found.get((name, size), UNKNOWN) for name in names)] for size in sizes]
    return card(title, drawing), card("Utilization", table(("accelerators", *names), rows))
