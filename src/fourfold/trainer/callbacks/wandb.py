"""Weights & Biases: a run there for each run here, also in its offline mode.

Law: a run that resumes goes on under the id that its folder keeps, and logs no step twice.
"""

import os
import secrets
from collections.abc import Mapping
from typing import Any

from fourfold.trainer.callbacks.logged_run import LoggedRun, check_logger, run_config
from fourfold.words.callback import Callback, EndEvent, EvaluateEvent, StartEvent, StepEvent


class WandB(Callback):
    """Logs to Weights & Biases; its files are in the run's folder.

    mode      "online" or "offline" (`wandb sync` uploads it later); None: what WANDB_MODE says, else online
    every     steps between those that are logged; the first is always logged
    settings  further arguments of `wandb.init`
    """

    def __init__(
        self,
        project: str = "fourfold",
        *,
        entity: str | None = None,
        mode: str | None = None,
        every: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises SettingError if wandb is not installed, or for an impossible `every`."""
        check_logger("wandb", every, callback="WandB")
        self._project, self._entity, self._mode, self._settings = project, entity, mode, dict(settings or {})
        self._every = every

    def on_start(self, event: StartEvent) -> None:
        import wandb

        self._logged = logged = LoggedRun(event.folder, "wandb", step=event.step, every=self._every)
        is_new = not logged.run_id
        run_id = secrets.token_hex(8) if is_new else logged.run_id
        is_offline = (self._mode or os.environ.get("WANDB_MODE")) == "offline"
        given = {
            "project": self._project,
            "entity": self._entity,
            "name": event.name,
            "id": run_id,
            "dir": str(event.folder),
            "config": run_config(event),
            "mode": self._mode,
            "reinit": "create_new",  # leaves a run of the user's own alone
            # An offline run is a new folder with the same id, which `wandb sync` joins to the first.
            "resume": None if is_new or is_offline else "allow",
        }
        self._run: Any = wandb.init(**{**given, **self._settings})
        logged.set_run(self._run.id)

    def on_step(self, event: StepEvent) -> None:
        if metrics := self._logged.of_step(event):
            self._run.log(metrics, step=event.step)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        if metrics := self._logged.of_evaluation(event):
            self._run.log(metrics, step=event.step)

    def on_end(self, event: EndEvent) -> None:
        self._run.summary["status"] = event.status
        self._run.finish(exit_code=0 if event.status in ("finished", "stopped") else 1)
        self._logged.close()
