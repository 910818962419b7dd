"""Checkpoint card: a run's checkpoints on the page: those on the disk, those damaged, those that were never written.

Law: what exists and its size come from the disk, pauses and failures from the log; neither is inferred from the other.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.checkpoint.store import CheckpointStore
from fourfold.report.html_table import UNKNOWN, render_row, render_table
from fourfold.report.line_chart import Series
from fourfold.trainer.progress import format_seconds
from fourfold.words.units import format_bytes

FAILED_WARNING = re.compile(r"the checkpoint of step ([0-9]{1,15}) could not be written: ([^;]*)")
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,15})")
KEPT, BEST, DAMAGED, NOT_WRITTEN = "kept", "kept, the best", "damaged, set aside", "not written"
COLUMNS = ("step", "size", "pause", "")


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is on the disk, or that was lost. None means unknown."""

    step: int
    num_bytes: int | None
    pause_seconds: float | None
    status: str
    text: str = ""


class CheckpointHistory(NamedTuple):
    """The pause of every save that was begun, by step; and the checkpoints kept, damaged or not written, by step."""

    pauses: Mapping[int, float]
    checkpoints: Sequence[SavedCheckpoint] = ()

    @property
    def written_steps(self) -> set[int]:
        """The steps of the successful saves, according to the log."""
        return {*self.pauses} - {each.step for each in self.checkpoints if each.status == NOT_WRITTEN}

    @property
    def on_disk(self) -> list[SavedCheckpoint]:
        return [each for each in self.checkpoints if each.status in (KEPT, BEST)]


def read_checkpoints(run_dir: Path, lines: Iterable[Mapping[str, Any]]) -> CheckpointHistory:
    """The checkpoints, from the run's folder and the lines of its log. Raises OSError."""
    pauses: dict[int, float] = {}
    lost: list[SavedCheckpoint] = []
    for line in lines:
        if "pause_seconds" in line:
            pauses[line["step"]] = line["pause_seconds"]
        elif "damaged" in line and (name := CHECKPOINT_NAME.fullmatch(line["checkpoint"])):
            texts = [text.rpartition(f"{line['checkpoint']}/")[2] for text in line["damaged"]]
            lost.append(SavedCheckpoint(int(name[1]), None, None, DAMAGED, "; ".join(texts)))
        elif "warning" in line and (failed := FAILED_WARNING.match(line["warning"])):
            lost.append(SavedCheckpoint(int(failed[1]), None, pauses.get(int(failed[1])), NOT_WRITTEN, failed[2]))
    store = CheckpointStore(run_dir)
    best = store.best_step()
    on_disk = [
        SavedCheckpoint(step, _num_bytes(store.step_dir(step)), pauses.get(step), BEST if step == best else KEPT)
        for step in store.steps()
    ]
    return CheckpointHistory(pauses, sorted([*lost, *on_disk], key=lambda each: each.step))


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def checkpoint_ticks(checkpoints: CheckpointHistory, *, last_step: int) -> Series:
    """A tick for every save, on an axis of steps that ends at `last_step`."""
    steps = checkpoints.written_steps | {each.step for each in checkpoints.on_disk}
    return Series("checkpoint", [(float(step), 0.0) for step in sorted(steps) if step <= last_step], 2, "tick")


def checkpoints_card(checkpoints: CheckpointHistory) -> str:
    """The card: how many checkpoints were saved, how long each paused training, which are kept."""
    pauses, saved = checkpoints
    if not pauses and not saved:
        return '<h2>Checkpoints</h2><p class="note">None was saved.</p>'
    notes = [f"{len(checkpoints.written_steps):,} saved, {len(checkpoints.on_disk)} kept"]
    if pauses:
        typical, longest = statistics.median(pauses.values()), max(pauses.values())
        notes.append(f"pause {format_seconds(typical)} in the median, {format_seconds(longest)} at most")
    table = render_table(COLUMNS, [render_row(_row_cells(each)) for each in saved], style="saved") if saved else ""
    return f'<h2>Checkpoints</h2><p class="note">{escape(" · ".join(notes))}</p>{table}'


def _row_cells(saved: SavedCheckpoint) -> Sequence[str]:
    size = UNKNOWN if saved.num_bytes is None else format_bytes(saved.num_bytes)
    pause = UNKNOWN if saved.pause_seconds is None else format_seconds(saved.pause_seconds)
    return f"{saved.step:,}", size, pause, f"{saved.status}: {saved.text}" if saved.text else saved.status
