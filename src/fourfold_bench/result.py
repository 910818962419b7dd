"""Result: what an emulated training measured, as records, as JSON, and as text for a terminal.

waits   how long accelerators waited for their batches, one number for each counted step of each accelerator
Law: the figures of an epoch are of one window: its steps without the first. Those of a run are of all its windows. The
text says what was scaled down, what the page cache held, and in which window all figures were measured.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.trace.utilization import EXCLUDED_STEPS, Window, add_windows, all_ranks, epoch_window
from fourfold.words.terminal_text import table_lines, terminal_width
from fourfold.words.units import format_bytes, format_bytes_per_second, format_si
from fourfold_bench.disk import Ceiling, CheckpointTimes
from fourfold_bench.ranks import EpochSteps
from fourfold_bench.workload import Workload

# ---- the figures -----------------------------------------------------------------------------------------------------


WAIT_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # seconds; each bar begins where the one before ends
WINDOW_TEXT = (
    "from the end of an epoch's first step to the end of its last: utilization, samples, bytes and waits are of these "
    "steps"
)


@dataclass(frozen=True)
class Epoch:
    """One epoch. `first_wait`: for the batch of the step that is not counted; `cached`: see `ranks.EpochSteps`."""

    window: Window
    waits: tuple[float, ...]
    first_wait: float
    cached: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One emulated training.

    workload     as it was run; `full`: as DLIO has it
    scaled       what differs between the two, in words
    ceilings     of the disk, before and after the training
    origin       bytes a second that the storage was held to; None: not at all
    is_staged    whether the files were copied to this disk in the first epoch
    need         bytes a second that one accelerator reads at full utilization, of the records as they are in the files
    """

    workload: Workload
    accelerators: int
    scaled: tuple[str, ...]
    cache: str
    epochs: tuple[Epoch, ...]
    ceilings: tuple[Ceiling, ...]
    origin: float | None
    is_staged: bool
    need: float
    checkpoint: CheckpointTimes | None = None

    @property
    def total(self) -> Window:
        return add_windows(epoch.window for epoch in self.epochs)

    @property
    def label(self) -> str:
        """The workload, and whether it is staged."""
        return f"{self.workload.name}, staged" if self.is_staged else self.workload.name

    @property
    def utilization(self) -> float | None:
        """Of all epochs; where files are staged, of the last one, for which they have been copied."""
        return (self.epochs[-1].window if self.is_staged else self.total).utilization

    @property
    def passes(self) -> bool | None:
        """Whether the workload's threshold is met; None if it has none, or nothing was measured."""
        value, threshold = self.total.utilization, self.workload.threshold
        return None if value is None or threshold is None else value >= threshold

    @property
    def ceiling(self) -> float:
        """Bytes a second that this storage delivers: the mean of what was measured, and not more than its origin."""
        measured = sum(each.bytes_per_second for each in self.ceilings) / len(self.ceilings)
        return measured if self.origin is None else min(self.origin, measured)

    @property
    def fed_accelerators(self) -> int:
        """How many accelerators this storage can feed by its ceiling, at the threshold, or else at full utilization."""
        return math.floor(self.ceiling / (self.need * (self.workload.threshold or 1.0)))

    @property
    def waits(self) -> list[float]:
        return [wait for epoch in self.epochs for wait in epoch.waits]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "workload": dataclasses.asdict(self.workload),
            "accelerators": self.accelerators,
            "scaled": list(self.scaled),
            "window": WINDOW_TEXT,
            "page_cache": self.cache,
            "epochs": [
                {**_window_json(epoch.window), "waits": waits_json(epoch.waits), "first_wait_seconds": epoch.first_wait}
                | {"cached": epoch.cached}
                for epoch in self.epochs
            ],
            "total": {**_window_json(self.total), "waits": waits_json(self.waits)},
            "threshold": self.workload.threshold,
            "passes": self.passes,
            "ceilings": [each._asdict() for each in self.ceilings],
            "origin": self.origin,
            "staged": self.is_staged,
            "need_bytes_per_second": self.need,
            "accelerators_that_can_be_fed": self.fed_accelerators,
            "checkpoint": None if self.checkpoint is None else self.checkpoint._asdict(),
        }


def _window_json(window: Window) -> dict[str, Any]:
    rates = {name: getattr(window, name) for name in ("utilization", "samples_per_second", "bytes_per_second")}
    return window._asdict() | rates


def make_epochs(by_rank: Sequence[Sequence[EpochSteps]]) -> tuple[Epoch, ...]:
    """The epochs of a training, of what each rank has measured."""
    epochs = []
    for ranks in zip(*by_rank, strict=True):
        window = all_ranks([epoch_window(each.steps) for each in ranks])
        waits = tuple(step.data_seconds for each in ranks for step in each.steps[EXCLUDED_STEPS:])
        first = max((each.steps[0].data_seconds for each in ranks if each.steps), default=0.0)
        epochs.append(Epoch(window, waits, first, ranks[0].cached))
    return tuple(epochs)


def histogram(waits: Sequence[float]) -> list[tuple[str, int]]:
    """How many waits were how long: (label, count)."""
    edges = (0.0, *WAIT_EDGES, math.inf)
    return [
        (_edge_text(low, high), sum(low <= wait < high for wait in waits)) for low, high in itertools.pairwise(edges)
    ]


def _edge_text(low: float, high: float) -> str:
    if low == 0.0:
        return f"below {_seconds(high)}"
    return f"above {_seconds(low)}" if high == math.inf else f"{_seconds(low)} to {_seconds(high)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _percentile(values: Sequence[float], fraction: float) -> float:
    """The value below or at which this fraction of the values is; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(fraction * len(ordered)) - 1))] if ordered else 0.0


def waits_json(waits: Sequence[float]) -> dict[str, Any]:
    """The waits in short."""
    short = {f"p{percent}": _percentile(waits, percent / 100) for percent in (50, 99, 100)}
    return {**short, "histogram": dict(histogram(waits))}


# ---- as text ---------------------------------------------------------------------------------------------------------


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
    p50, p99, longest = (milliseconds(_percentile(waits, fraction)) for fraction in (0.5, 0.99, 1.0))
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
