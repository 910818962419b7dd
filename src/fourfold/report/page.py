"""Page: a run, or a comparison of several, as one HTML file that needs no other.

figure   a number by which a run is judged
measure  a value of an evaluation: the loss, or what the task's `evaluate` returns
Law: what a run has not recorded has no card; a page is written whole, and shows the runs as their files are now. What
was predicted and what was measured stand next to each other in one unit; what is unknown is a dash. Runs whose values
cannot be compared have separate drawings. In a comparison every row has a value of each run, or a dash; a value is
called the best only where it is known which direction is better, and where runs differ.
"""

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fourfold.axes.pipeline.rules.schedules import ASYNCHRONOUS
from fourfold.environment.atomic_file import write_atomically
from fourfold.report.document import (
    UNKNOWN,
    Card,
    Part,
    Point,
    Series,
    card,
    curves,
    document,
    format_value,
    heading,
    note,
    render,
    table,
    text,
    values,
)
from fourfold.report.run_record import DataRecord, Faults, MemoryRecord, RunRecord, SavedCheckpoint, read_run
from fourfold.report.step_timeline import action_card, prediction_card, step_card
from fourfold.trace.utilization import Window, add_windows
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from fourfold.trainer.progress import format_duration, format_seconds
from fourfold.words.measures import AVERAGED_STEPS, training_loss
from fourfold.words.mesh import AXES
from fourfold.words.terminal_text import escape_controls
from fourfold.words.units import format_bytes, format_bytes_per_second, format_si

# ---- key figures -----------------------------------------------------------------------------------------------------


Direction = Literal["lower", "higher", ""]

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
    figures = [_measure_figure(record, name) for name in _last_measures(record)]
    if losses := record.training_losses:
        loss, over = training_loss(losses), f"last {AVERAGED_STEPS} steps that were not skipped"
        is_all = len(losses) == len(record.steps)
        figures.append(Figure("training loss", format_measure(loss), loss, "lower", "" if is_all else over))
    rate, waiting = record.units_per_second, 100 * record.waiting_fraction()
    last = f"last {AVERAGED_STEPS} steps"
    rate_note = f"{last} {format_si(record.recent_units_per_second)}"
    waiting_note = f"{last} {100 * record.waiting_fraction(is_recent=True):.0f} %"
    segments = f"{len(record.segments)} segments" if len(record.segments) > 1 else ""
    figures += [
        Figure("steps", f"{len(record.steps):,}"),
        Figure(f"{record.unit} a second", format_si(rate), rate, "higher", rate_note),
        Figure("time", format_duration(record.total_seconds), record.total_seconds, note=segments),
        Figure("waiting", f"{waiting:.1f} %", waiting, "lower", waiting_note),
    ]
    if (used := add_windows(each.window for each in record.data).utilization) is not None:
        figures.append(Figure("utilization", _percent(used), used, "higher"))
    sent = record.mean_sent_bytes
    figures.append(Figure("sent a step by rank 0", format_bytes(sent), sent, "lower"))
    if record.memory is not None and (peak := record.memory.largest_peak_bytes) is not None:
        figures.append(Figure("peak memory of a rank", format_bytes(peak), peak, "lower"))
    return figures


def _best_evaluations(record: RunRecord) -> Iterator[Figure]:
    """The best value of each measure whose better direction is known."""
    for name in _last_measures(record):
        if (best := _best(record, name)) is not None:
            step, value = best
            shown = f"best {_measure_name(name)}"
            yield Figure(shown, format_measure(value), value, better_direction(name), f"step {step:,}")


def best_indices(figures: Sequence[Figure | None]) -> set[int]:
    """Which of several runs have the best value of one figure; none if all are equal, or it cannot be said."""
    known = {
        index: each
        for index, each in enumerate(figures)
        if each is not None and each.better and each.value is not None and math.isfinite(each.value)
    }
    if len({each.text for each in known.values()}) < 2:
        return set()
    (better,) = {each.better for each in known.values()}
    best = (min if better == "lower" else max)(each.value for each in known.values())  # type: ignore[type-var]
    return {index for index, each in known.items() if each.value == best}


def format_measure(value: float | None) -> str:
    """A value of an evaluation. JSON has no NaN: the log says null."""
    if value is None or not math.isfinite(value):
        return "nan"
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4e}"


def _last_measures(record: RunRecord) -> Mapping[str, float | None]:
    return record.evaluations[-1][1] if record.evaluations else {}


def _measure_figure(record: RunRecord, name: str) -> Figure:
    value, best = _last_measures(record)[name], _best(record, name)
    shown = f"best {format_measure(best[1])} at step {best[0]:,}" if best is not None and best[1] != value else ""
    return Figure(_measure_name(name), format_measure(value), value, better_direction(name), shown)


def _best(record: RunRecord, name: str) -> tuple[int, float] | None:
    """The best value of a measure, as (step, value)."""
    better = better_direction(name)
    given = [(step, each.get(name)) for step, each in record.evaluations]
    finite = [(step, value) for step, value in given if value is not None and math.isfinite(value)]
    return (min if better == "lower" else max)(finite, key=lambda pair: pair[1]) if better and finite else None


def _measure_name(name: str) -> str:
    return f"validation {name}" if name == "loss" else name


# ---- curves ----------------------------------------------------------------------------------------------------------


MAX_POINTS = 500  # of a curve: no drawing shows more
MAX_NAME_LENGTH = 14  # letters that fit into a drawing's legend
EMA_PREFIX = "ema "  # of a measure with the averaged weights
RESTART, SKIPPED = "restart", "skipped step"


def _chart_cards(records: Sequence[RunRecord]) -> list[Card | None]:
    """The curves of one run, or of several in one frame: loss, throughput, measures, learning rate, gradient norm."""
    return [
        _loss_card(records),
        _throughput_card(records),
        *_measure_cards(records),
        _step_field_card(records, "lr", "Learning rate", y="learning rate"),
        _grad_norm_card(records),
    ]


def _loss_card(records: Sequence[RunRecord]) -> Card:
    """The loss, smoothed, and the validation loss; for one run also single steps, faults and checkpoints."""
    is_one = len(records) == 1
    series, dots = list[Series](), list[Series]()
    for index, record in enumerate(records):
        losses, name = _step_points(record, "loss"), record.name
        if is_one:
            series.append(Series("each step", downsample(losses), index, "faint", named=False))
        series.append(Series("training" if is_one else name, downsample(smooth(losses)), index))
        for number, measure in enumerate(["loss", f"{EMA_PREFIX}loss"] if is_one else ["loss"]):
            kind = f"validation{', ema' * number}"
            colour, points = (number + 1 if is_one else index), _evaluation_points(record, measure)
            dots.append(Series(kind if is_one else f"{name}, {kind}", points, colour, "dots", named=is_one))
    marks, under = [], "Dots: validation."
    if is_one:
        (one,) = records
        marks = [*fault_marks(one.faults.faults, last_step=one.last_step), _checkpoint_ticks(one)]
        under = _no_faults_note(one.faults, one.resumed_steps)
    drawing = curves([*marks, *series, *dots], x="step", y="loss", title="Loss")
    return card("Loss", drawing or text("No step has ended."), note(under))


def _measure_cards(records: Sequence[RunRecord]) -> Iterator[Card]:
    """A card for each measure but the loss, if a run has more than one value of it."""
    is_one = len(records) == 1
    names = dict.fromkeys(
        name.removeprefix(EMA_PREFIX) for record in records for _, measures in record.evaluations for name in measures
    )
    for measure in names:
        # Several runs with two curves each would be hard to read.
        series = [
            Series(f"{prefix}{measure}" if is_one else record.name, points, number if is_one else index, "linked")
            for index, record in enumerate(records)
            for number, prefix in enumerate(["", EMA_PREFIX] if is_one else [""])
            for points in [_evaluation_points(record, f"{prefix}{measure}")]
        ]
        if measure != "loss" and any(len(each.points) > 1 for each in series):
            yield card(_capitalized(measure), curves(series, x="step", y=measure, title=measure, legend=not is_one))


def _step_field_card(
    records: Sequence[RunRecord], field: str, title: str, *, y: str, under: str = "", is_smooth: bool = False
) -> Card | None:
    """A curve per run of a field of its steps; None if the log has none."""
    is_one, series = len(records) == 1, list[Series]()
    for index, record in enumerate(records):
        points = _step_points(record, field)
        if is_one and is_smooth:
            series.append(Series("each step", downsample(points), index, "faint", named=False))
        name = record.name if not is_one else "mean" if is_smooth else y
        series.append(Series(name, downsample(smooth(points) if is_smooth else points), index))
    drawing = curves(series, x="step", y=y, title=title, legend=not is_one)
    return card(title, drawing, note(under)) if drawing else None


def _grad_norm_card(records: Sequence[RunRecord]) -> Card | None:
    clip = records[0].settings.get("clip")
    is_known = len(records) == 1 and isinstance(clip, int | float)
    under = f"Before clipping at {clip:g}." if is_known else "Before clipping."
    return _step_field_card(records, "grad_norm", "Gradient norm", y="norm", under=under, is_smooth=True)


def _throughput_card(records: Sequence[RunRecord]) -> Card:
    """Throughput over the training time. One drawing per unit: samples and tokens are not comparable."""
    by_unit: dict[str, list[Series]] = {}
    is_one = len(records) == 1
    for index, record in enumerate(records):
        ends = itertools.accumulate(line["seconds"] for line in record.steps)
        rates = (line["units"] / max(line["seconds"], 1e-9) for line in record.steps)
        # The first step allocates, so it is left out.
        points = downsample(smooth(list(zip(ends, rates, strict=True))[1:]), _mean)
        by_unit.setdefault(record.unit, []).append(Series("throughput" if is_one else record.name, points, index))
    drawings = []
    for unit, series in by_unit.items():
        factor, prefix = _unit_prefix(max((y for each in series for _, y in each.points), default=0.0))
        scaled = [each._replace(points=[(x, y / factor) for x, y in each.points]) for each in series]
        y, title = f"{prefix}{unit} a second", f"Throughput, {unit}"
        drawings.append(curves(scaled, x="training time, s", y=y, title=title, from_zero=True, legend=not is_one))
    return card("Throughput", *(drawings if any(drawings) else [text("Too few steps.")]))


def _evaluation_points(record: RunRecord, measure: str) -> list[Point]:
    """The finite values of a measure, by step."""
    given = ((step, measures.get(measure)) for step, measures in record.evaluations)
    found = {step: value for step, value in given if value is not None and math.isfinite(value)}
    return [(float(step), found[step]) for step in sorted(found)]


def _step_points(record: RunRecord, field: str) -> list[Point]:
    """The finite values of the steps that have trained; a skipped one is a mark."""
    given = ((line["step"], line.get(field)) for line in record.steps if not line.get("skipped"))
    return [(step, value) for step, value in given if value is not None and math.isfinite(value)]


def fault_marks(faults: Sequence[Fault], *, last_step: int) -> list[Series]:
    """Marks for an axis of steps that ends at `last_step`: restarts as rules, all others as pegs."""
    in_range = [fault for fault in faults if 0 <= fault.step <= last_step]
    kinds = {fault.kind for fault in in_range if fault.kind != RESTART}
    name = escape_controls(kinds.pop()) if len(kinds) == 1 else "other fault"
    name = name if len(name) <= MAX_NAME_LENGTH else "other fault"
    points = {is_restart: [(float(fault.step), 0.0) for fault in in_range if (fault.kind == RESTART) == is_restart]
              for is_restart in (True, False)}  # fmt: skip
    return [Series(RESTART, points[True], kind="rule"), Series(name, points[False], kind="peg")]


def _checkpoint_ticks(record: RunRecord) -> Series:
    """A tick for every save."""
    steps = record.checkpoints.written_steps | {each.step for each in record.checkpoints.on_disk}
    return Series("checkpoint", [(float(step), 0.0) for step in sorted(steps) if step <= record.last_step], kind="tick")


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving means over a fiftieth of the points, each at the last point of its window."""
    width = max(1, len(points) // 50)
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    head = [(x, sums[index] / index) for index, (x, _) in enumerate(points[:width], 1)]
    windows = zip(points[width:], sums[1:], sums[width + 1 :], strict=False)
    return head + [(x, (stop - start) / width) for (x, _), start, stop in windows]


def downsample(points: Sequence[Point], pick: Callable[[Sequence[Point]], Point] = lambda some: some[0]) -> list[Point]:
    """At most about MAX_POINTS points, always with the last one. `pick` makes one point of several."""
    stride = -(-len(points) // MAX_POINTS) or 1
    picked = [pick(points[index : index + stride]) for index in range(0, len(points), stride)]
    return picked if not points or picked[-1] == points[-1] else [*picked, points[-1]]


def _mean(points: Sequence[Point]) -> Point:
    return points[-1][0], sum(y for _, y in points) / len(points)


def _unit_prefix(most: float) -> tuple[float, str]:
    return (1e6, "million ") if most >= 2e6 else (1e3, "thousand ") if most >= 2e3 else (1.0, "")


def _capitalized(name: str) -> str:
    return name[:1].upper() + name[1:]


# ---- tables ----------------------------------------------------------------------------------------------------------


MAX_NAMED_STEPS = 5
SEGMENT_NOTE = "Steps after a segment's last checkpoint were repeated; their first time is not counted."
MEMORY_NOTE = (
    "Kept: the same as allocated, plus communication and checkpoint buffers; shared memory counts for the rank "
    "that allocated it. Peak: the largest resident set of the process, including libraries and activations."
)
DATA_NOTE = (
    "Utilization: the time that is not spent waiting for data ÷ the time of the steps with their waits, as DLIO and "
    "MLPerf Storage define it. All figures of a row are of the same steps: those given, without the first of each "
    "epoch, and without evaluations and checkpoints. A step waits for the rank whose batch comes last."
)


def _checkpoints_card(record: RunRecord) -> Card:
    """How many checkpoints were saved, how long each paused training, which are kept."""
    pauses, saved = record.checkpoints
    if not pauses and not saved:
        return card("Checkpoints", note("None was saved."))
    notes = [f"{len(record.checkpoints.written_steps):,} saved, {len(record.checkpoints.on_disk)} kept"]
    if pauses:
        typical, longest = statistics.median(pauses.values()), max(pauses.values())
        notes.append(f"pause {format_seconds(typical)} in the median, {format_seconds(longest)} at most")
    rows = table(("step", "size", "pause", ""), [_checkpoint_cells(each) for each in saved]) if saved else None
    return card("Checkpoints", note(" · ".join(notes)), rows)


def _checkpoint_cells(saved: SavedCheckpoint) -> Sequence[str]:
    size, pause = _known(saved.num_bytes, format_bytes), _known(saved.pause_seconds, format_seconds)
    return f"{saved.step:,}", size, pause, f"{saved.status}: {saved.text}" if saved.text else saved.status


def faults_card(faults: Faults, resumed: Sequence[int]) -> Card | None:
    """The faults; None if there were none."""
    known, num_unreadable = faults
    if not known and not num_unreadable:
        return None
    counts = Counter(fault.kind for fault in known)
    notes = [f"{kind} × {count}" if count > 1 else kind for kind, count in counts.items()]
    lost = [fault.seconds for fault in known if fault.seconds is not None and math.isfinite(fault.seconds)]
    if lost:
        notes.append(f"{format_seconds(sum(lost))} in total until training continued")
    if resumed:
        notes.append(_resumed_note(resumed))
    if num_unreadable:
        lines = "line" if num_unreadable == 1 else "lines"
        notes.append(f"{num_unreadable} {lines} of {FAULTS_FILE} could not be read")
    rows = [_fault_cells(fault) for fault in sorted(known, key=lambda fault: fault.time)]
    shown = table(("when, UTC", "what", "step", "where", "back after", ""), rows) if rows else None
    return card("Faults and restarts", note(" · ".join(notes)), shown, wide=True)


def _no_faults_note(faults: Faults, resumed: Sequence[int]) -> str:
    """The note under the loss where there is no table of faults."""
    if faults.faults or faults.num_unreadable:
        return ""
    return f"No faults; {_resumed_note(resumed)}." if resumed else "No faults, no restarts."


def _resumed_note(steps: Sequence[int]) -> str:
    if len(steps) > MAX_NAMED_STEPS:
        return f"resumed from a checkpoint {len(steps):,} times"
    return f"resumed from step {', '.join(f'{step:,}' for step in steps)}"


def _fault_cells(fault: Fault) -> Sequence[str]:
    where = [f"rank {fault.rank}"] if fault.rank is not None else []
    where += [fault.host] if fault.host else []
    seconds = fault.seconds if fault.seconds is not None and math.isfinite(fault.seconds) else None
    try:
        when = datetime.fromtimestamp(fault.time, UTC).strftime("%-d %b %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a time outside the calendar
        when = UNKNOWN
    step = f"{fault.step:,}" if fault.step >= 0 else UNKNOWN
    return when, fault.kind, step, ", ".join(where) or UNKNOWN, _known(seconds, format_seconds), fault.text


def _segments_card(record: RunRecord) -> Card | None:
    """The time of each segment; None if there is only one."""
    if len(record.segments) == 1:
        return None
    rows = []
    for each in record.segments:
        steps = UNKNOWN if each.last_step < each.first_step else _range(each.first_step, each.last_step)
        rate = format_si(each.num_units / each.seconds) if each.num_units and each.seconds > 0 else UNKNOWN
        began = f"resumed from step {each.first_step - 1:,}" if each.first_step > 1 else "started"
        rows.append((steps, format_seconds(each.seconds), rate, began))
    return card("Time by segment", note(SEGMENT_NOTE), table(("steps", "time", "a second", ""), rows))


def memory_card(memory: MemoryRecord | None) -> Card | None:
    """The memory of each rank; None if the run has not measured it."""
    if memory is None:
        return None
    has_device = any(rank.device_bytes is not None for rank in memory.ranks)
    columns = ["", "predicted", "kept", *(["peak on the GPU"] if has_device else []), "peak", "before the model"]
    predicted = sum(memory.predicted.values()) if memory.predicted is not None else None
    rows = []
    for number, rank in enumerate(memory.ranks):
        measured = [rank.kept_bytes, *([rank.device_bytes] if has_device else []), rank.peak_bytes, rank.before_bytes]
        rows.append([f"rank {number}", *(_known(each, format_bytes) for each in [predicted, *measured])])
    kinds = " + ".join(f"{name} {format_bytes(num)}" for name, num in (memory.predicted or {}).items())
    notes = [f"Measured after step {memory.step:,}.", *([f"Predicted from the plan: {kinds}."] if kinds else [])]
    return card("Memory of each rank", table(columns, rows), note(" ".join([*notes, MEMORY_NOTE])))


def _data_card(records: Sequence[DataRecord]) -> Card | None:
    """A row per segment and one for all; None for a run that has not measured its waits."""
    if not records:
        return None
    rows = [_data_cells(each) for each in records]
    if len(records) > 1:
        total = add_windows(each.window for each in records)
        rows.append(["all", f"{total.num_steps:,} counted", *_data_figures(total), UNKNOWN])
    columns = ("epochs", "steps", "utilization", "samples a second", "bytes read a second", "waited most")
    return card("Waiting for data", table(columns, rows), note(DATA_NOTE), wide=True)


def _data_cells(record: DataRecord) -> list[str]:
    fraction = record.rank_seconds / record.running_seconds if record.running_seconds > 0 else 0.0
    waited = f"rank {record.rank} on {record.host}, {100 * fraction:.1f} % of the time"
    return [
        _range(record.first_epoch + 1, record.last_epoch + 1),
        _range(record.first_step, record.last_step),
        *_data_figures(record.window),
        waited if record.rank_seconds > 0 else UNKNOWN,
    ]


def _data_figures(window: Window) -> list[str]:
    rate, num_bytes = window.samples_per_second, window.bytes_per_second
    return [_known(window.utilization, _percent), _known(rate, format_si), _known(num_bytes, format_bytes_per_second)]


def _known(value: Any, shown: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else shown(value)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _range(first: int, last: int) -> str:
    return f"{first:,} to {last:,}" if last > first else f"{first:,}"


# ---- pages -----------------------------------------------------------------------------------------------------------


REPORT_FILE = "report.html"


def write_report(paths: Sequence[Path]) -> Path:
    """Write the report of the runs in these folders; returns its path.

    The page of one run goes into its folder, that of several next to the first run's folder. Raises ReportError if a
    run cannot be read.
    """
    records = [read_run(path) for path in paths]
    first = records[0]
    if len(records) == 1:
        path, data = first.path / REPORT_FILE, describe_run(first)
    else:
        path, data = first.path.parent / f"{'+'.join(each.name for each in records)}.html", compare_runs(records)
    write_atomically(path, render(data).encode())
    return path


def describe_run(record: RunRecord) -> dict[str, Any]:
    """The data of the page of one run."""
    trace = record.trace if record.trace is not None and record.trace.events else None
    is_asynchronous = record.plan.get("pp", 1) > 1 and record.plan.get("schedule") in ASYNCHRONOUS
    data = run_document(
        record,
        action_card(trace) if trace else card("Time by action", text("No step of this run was traced.")),
        prediction_card(record.prediction, trace, [line["seconds"] for line in record.steps]),
        step_card(trace, is_asynchronous=is_asynchronous) if trace else None,
    )
    return data if record.finish_line is not None else {**data, "under": f"{data['under']} · not finished"}


def run_document(record: RunRecord, *others: Card | None) -> dict[str, Any]:
    """What the page and the live page of a run have in common, and other cards."""
    size = math.prod(record.plan.get(axis, 1) for axis in AXES)
    ranks = "1 process" if size == 1 else f"{size} ranks"
    under = filter(None, [record.settings.get("task", "run"), ranks, record.settings.get("transport", "")])
    cards = [
        faults_card(record.faults, record.resumed_steps),
        *_chart_cards([record]),
        memory_card(record.memory),
        _checkpoints_card(record),
        _segments_card(record),
        *others,
        _data_card(record.data),
        card("Plan and settings", *_sections(record), wide=True, columns=True),
    ]
    figures = [(each.text, f"{each.name}, {each.note}" if each.note else each.name) for each in key_figures(record)]
    return document(record.name, " · ".join(under), cards, figures=figures)


def _sections(record: RunRecord) -> Iterator[Part]:
    titles = {"plan": "Plan", "settings": "Settings", "task": "Arguments of the task", "environment": "Environment"}
    for name, title in titles.items():
        if given := record.sections[name]:
            yield heading(title)
            yield values(given)


def compare_runs(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The data of the page that compares several runs."""
    cards = [_differing_settings(records), _final_values(records), *_chart_cards(records)]
    return document(" · ".join(record.name for record in records), f"{len(records)} runs compared", cards)


def _final_values(records: Sequence[RunRecord]) -> Card:
    tables = [_figures(record) for record in records]
    rows, best = [], []
    for row, name in enumerate(dict.fromkeys(name for each in tables for name in each)):
        figures = [each.get(name) for each in tables]
        best += [(row, index + 1) for index in sorted(best_indices(figures))]
        rows.append([name, *(_known(each, lambda one: f"{one.text} ({one.note})" if one.note else one.text)
                             for each in figures)])  # fmt: skip
    under = "★ marks the best value of a row, if the name of the metric tells whether lower or higher is better."
    shown = table(["", *(record.name for record in records)], rows, style="runs", best=best)
    return card("Final values", shown, note(under), wide=True)


def _figures(record: RunRecord) -> dict[str, Figure]:
    """The final figures by name, those of evaluations without their best values, which have rows of their own."""
    names = set(_last_measures(record))
    finals = [
        each._replace(note="") if each.name.removeprefix("validation ") in names else each
        for each in key_figures(record)
    ]
    counts = record.faults.count(RESTART), record.faults.count(SKIPPED)
    lost = Figure("restarts / skipped steps", f"{counts[0]:,} / {counts[1]:,}")
    return {each.name: each for each in (*finals, *_best_evaluations(record), lost)}


def _differing_settings(records: Sequence[RunRecord]) -> Card:
    tables = [_all_settings(record) for record in records]
    rows = []
    for name in dict.fromkeys(name for each in tables for name in each):
        texts = [format_value(each[name]) if name in each else UNKNOWN for each in tables]
        if len(set(texts)) > 1:
            rows.append([name, *texts])
    shown = table(["", *(record.name for record in records)], rows, style="runs") if rows else text("Nothing.")
    return card("What differs in plan and settings", shown, wide=True)


def _all_settings(record: RunRecord) -> Mapping[str, Any]:
    """Settings, plan and environment by name; a name of several has the section before it."""
    found: dict[str, Any] = {}
    for section, given in record.sections.items():
        for name, value in given.items():
            found[name if name not in found else f"{section}: {name}"] = value
    return found
