"""CSV: the steps of a run and its evaluations as two tables, for a spreadsheet or pandas.

    runs/NAME/metrics.csv      a row per step
    runs/NAME/validation.csv   a row per evaluation

Law: each step has one row, in order. After a restart from an older checkpoint, later rows are rewritten.
"""

import csv
import io
from pathlib import Path
from typing import Any

from fourfold.environment.atomic_file import write_atomically
from fourfold.words.callback import Callback, EndEvent, EvaluateEvent, StartEvent, StepEvent

STEP_FIELDS = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "seconds", "waiting_seconds", "units_per_second",
               "skipped")  # fmt: skip


class CSV(Callback):
    """Writes metrics.csv and validation.csv.

    folder  None: the run's folder
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._steps: Any = None
        self._validation_path = Path()
        self._evaluations: list[dict[str, Any]] = []

    def on_start(self, event: StartEvent) -> None:
        folder = event.folder if self._folder is None else Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        path, self._validation_path = folder / "metrics.csv", folder / "validation.csv"
        write_atomically(path, _encode(_read_up_to(path, event.step), STEP_FIELDS))
        self._steps = path.open("a", newline="", buffering=1)
        self._evaluations = _read_up_to(self._validation_path, event.step)

    def on_step(self, event: StepEvent) -> None:
        values = (getattr(event, name) for name in STEP_FIELDS)
        csv.writer(self._steps).writerow(["" if value is None else +value for value in values])  # 0 or 1 of a bool

    def on_evaluate(self, event: EvaluateEvent) -> None:
        """Rewrite the table: a measure may have come since the last evaluation."""
        earlier = [row for row in self._evaluations if row["step"] != str(event.step)]
        self._evaluations = [*earlier, {"step": str(event.step), **event.metrics}]
        fields = dict.fromkeys(name for row in self._evaluations for name in row)
        write_atomically(self._validation_path, _encode(self._evaluations, tuple(fields)))

    def on_end(self, event: EndEvent) -> None:
        self._steps.close()


def _read_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a table up to that of `step`; none if there is no table. A row cut off by a kill is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    complete = (row for row in rows if None not in row.values() and row["step"].isdecimal())
    return [row for row in complete if int(row["step"]) <= step]


def _encode(rows: list[dict[str, Any]], fields: tuple[str, ...]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fields, extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
