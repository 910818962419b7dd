"""Key figures: the numbers by which a run is judged, and which of two values is the better one.

Law: a value is called the best only where it is known which direction is better, and where runs differ.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fourfold.report.cards import format_utilization, total_window
from fourfold.report.run_record import RunRecord
from fourfold.trainer.progress import format_duration
from fourfold.words.units import format_bytes, format_si

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
