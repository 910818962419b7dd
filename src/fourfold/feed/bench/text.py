"""Text: the result of an emulated training, for a terminal.

Law: it says what was scaled down, what the page cache held, and in which window all figures were measured.
"""

import textwrap
from collections.abc import Sequence

from fourfold.feed.bench.disk import Ceiling
from fourfold.feed.bench.result import WINDOW_TEXT, Result, histogram, percentile
from fourfold.plan.utilization import Window
from fourfold.words.terminal_text import terminal_width
from fourfold.words.text_table import table_lines
from fourfold.words.units import format_bytes, format_bytes_per_second, format_si

WIDTH = 100
COLUMNS = ("epoch", "utilization", "samples/s", "read", "wait, p50", "p99", "longest", "cached before")
BAR = 40
UNKNOWN = "–"
RULES = (
    "Not a result of MLPerf Storage: that needs data of 5 × the host's memory, 500 steps an epoch, and 5 runs after a "
    "warm-up."
)


def format_result(result: Result) -> str:
    """The whole report of one training."""
    workload = result.workload
    head = f"{name_of(result)}, {workload.batch_size} samples a step, files of {workload.format}"
    parts = [head, "", *table_lines([COLUMNS, *epoch_rows(result)], "<>>>>>>>"), ""]
    parts += [*_wrapped(f"Window: {WINDOW_TEXT}."), ""]
    parts += table_lines(summary_rows(result), "<<")
    if result.scaled:
        parts += ["", *_wrapped(f"Scaled: {'; '.join(result.scaled)}.")]
    parts += ["", *_wrapped(RULES), "", "Waits for a batch"]
    return "\n".join([*parts, *_histogram_lines(result)])


def name_of(result: Result) -> str:
    """unet3d on 2 × a100, 0.636 s a step."""
    workload = result.workload
    return f"{result.label} on {result.accelerators} × {workload.accelerator}, {workload.compute} a step"


def epoch_rows(result: Result) -> list[Sequence[str]]:
    """A row of COLUMNS for each epoch, and one for all."""
    rows: list[Sequence[str]] = []
    for number, epoch in enumerate(result.epochs, 1):
        cached = UNKNOWN if epoch.cached is None else f"{100 * epoch.cached:.0f} %"
        rows.append((str(number), *_figures(epoch.window), *_wait_cells(epoch.waits), cached))
    if len(result.epochs) > 1:
        rows.append(("all", *_figures(result.total), *_wait_cells(result.waits), ""))
    return rows


def _figures(window: Window) -> tuple[str, str, str]:
    return (
        percent(window.utilization),
        UNKNOWN if window.samples_per_second is None else format_si(window.samples_per_second),
        UNKNOWN if window.bytes_per_second is None else format_bytes_per_second(window.bytes_per_second),
    )


def _wait_cells(waits: Sequence[float]) -> tuple[str, str, str]:
    p50, p99, longest = (milliseconds(percentile(waits, fraction)) for fraction in (0.5, 0.99, 1.0))
    return p50, p99, longest


def percent(value: float | None) -> str:
    """97.3 %; a dash where nothing was measured."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def milliseconds(seconds: float) -> str:
    """12.3 ms, or 4.56 s from one second on."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def summary_rows(result: Result) -> list[tuple[str, str]]:
    """What is said of the whole training, as (name, value)."""
    rows = [("MLPerf Storage", _verdict(result)), ("page cache", result.cache)]
    if result.origin is not None:
        rows.append(("origin", f"held to {format_bytes_per_second(result.origin)}"))
    if result.is_staged:
        rows.append(("staged", "each file is copied to this disk in the first epoch, once for all accelerators"))
    names = ("disk before", "disk after")
    rows += [(name, _ceiling_text(each)) for name, each in zip(names, result.ceilings, strict=False)]
    rows.append(("an accelerator needs", f"{format_bytes_per_second(result.need)} to compute all the time"))
    at, most = percent(result.workload.threshold or 1.0), format_bytes_per_second(result.ceiling)
    many = f"{result.fed_accelerators:,} of these accelerators at {at} utilization, by its ceiling of {most}"
    rows.append(("this storage can feed", many))
    saved = result.checkpoint
    if saved is not None:
        written, read = format_bytes_per_second(saved.write_rate), format_bytes_per_second(saved.read_rate)
        text = f"{format_bytes(saved.num_bytes)}: written and fsynced in {saved.write_seconds:.2f} s ({written}), "
        text += f"read back in {saved.read_seconds:.2f} s ({read}), dropped from the page cache in between"
        rows.append(("checkpoint", text))
    return rows


def _verdict(result: Result) -> str:
    threshold = result.workload.threshold
    if result.passes is None or threshold is None:
        return "no threshold for this workload"
    return f"{'pass' if result.passes else 'fail'}: utilization of at least {percent(threshold)} is required"


def _ceiling_text(ceiling: Ceiling) -> str:
    how = f"direct I/O, random blocks of {format_bytes(ceiling.block_bytes)}, {ceiling.threads} threads"
    if ceiling.problem:
        how = how.replace("direct I/O", f"through the page cache, dropped before ({ceiling.problem})")
    return f"{format_bytes_per_second(ceiling.bytes_per_second)}, {how}"


def _histogram_lines(result: Result) -> list[str]:
    rows = histogram(result.waits)
    most = max(count for _, count in rows) or 1
    return table_lines([(label, str(count), "█" * round(BAR * count / most)) for label, count in rows], "<><")


def format_sweep(results: Sequence[Result]) -> str:
    """Utilization by number of accelerators, a column for each workload; where it is staged, of its last epoch."""
    names = list(dict.fromkeys(each.label for each in results))
    sizes = list(dict.fromkeys(each.accelerators for each in results))
    found = {(each.label, each.accelerators): each for each in results}
    rows: list[Sequence[str]] = [("accelerators", *names)]
    for size in sizes:
        cells = [found.get((name, size)) for name in names]
        rows.append((str(size), *(UNKNOWN if each is None else percent(each.utilization) for each in cells)))
    return "\n".join(table_lines(rows, "<" + ">" * len(names)))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, min(WIDTH, terminal_width()))
