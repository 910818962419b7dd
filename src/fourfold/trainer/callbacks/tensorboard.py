"""TensorBoard: scalars of a run as event files, in the folder `tensorboard` of the run.

Law: after a restart from an older checkpoint, what was written of later steps is hidden by what is written now.
"""

import json
from pathlib import Path
from typing import Any

from fourfold.trainer.callbacks.logged_run import check_logger, evaluate_metrics, is_logged, run_config, step_metrics
from fourfold.words.callback import Callback, CheckpointEvent, EndEvent, EvaluateEvent, StartEvent, StepEvent


class TensorBoard(Callback):
    """Writes loss, learning rate, throughput and validation for TensorBoard: `tensorboard --logdir runs`.

    folder  None: `tensorboard` in the run's folder
    every   steps between those that are logged; the first is always logged
    """

    def __init__(self, folder: str | None = None, *, every: int = 1) -> None:
        """Raises SettingError if tensorboard is not installed, or for an impossible `every`."""
        check_logger("tensorboard", every, callback="TensorBoard")
        self._folder, self._every = folder, every
        self._writer: Any = None

    def on_start(self, event: StartEvent) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = event.folder / "tensorboard" if self._folder is None else Path(self._folder)
        # Hides what earlier attempts have written of the steps that now come again.
        purged_from = event.step + 1 if folder.exists() else None
        self._writer = SummaryWriter(str(folder), purge_step=purged_from)
        if event.step == 0:
            self._writer.add_text("run", f"```json\n{json.dumps(run_config(event), indent=2)}\n```", 0)

    def on_step(self, event: StepEvent) -> None:
        if is_logged(event.step, self._every):
            self._add(step_metrics(event), event.step)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        self._add(evaluate_metrics(event), event.step)
        self._writer.flush()

    def _add(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        self._writer.flush()

    def on_end(self, event: EndEvent) -> None:
        self._writer.close()
