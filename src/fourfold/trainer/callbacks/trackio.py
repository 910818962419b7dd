"""Trackio: a run in its local database, or on a Hugging Face Space, for each run here.

Law: a run that resumes goes on under its name, and logs no step twice.
"""

import secrets
from typing import Any

from fourfold.trainer.callbacks.logged_run import LoggedRun, check_logger, run_config
from fourfold.words.callback import Callback, EndEvent, EvaluateEvent, StartEvent, StepEvent


class Trackio(Callback):
    """Logs to Trackio; `trackio show --project fourfold` shows it.

    space_id  of a Hugging Face Space; None: what TRACKIO_SPACE_ID says, else Trackio's database on this machine
    every     steps between those that are logged; the first is always logged
    """

    def __init__(self, project: str = "fourfold", *, space_id: str | None = None, every: int = 1) -> None:
        """Raises SettingError if trackio is not installed, or for an impossible `every`."""
        check_logger("trackio", every, callback="Trackio")
        self._project, self._space_id, self._every = project, space_id, every

    def on_start(self, event: StartEvent) -> None:
        import trackio

        self._logged = logged = LoggedRun(event.folder, "trackio", step=event.step, every=self._every)
        # Names are what Trackio resumes by, and folders of two machines may have the same.
        name = logged.run_id or f"{event.name}-{secrets.token_hex(3)}"
        self._run: Any = trackio.init(
            project=self._project,
            name=name,
            space_id=self._space_id,
            config=run_config(event),
            resume="allow",
            embed=False,  # no dashboard is started
        )
        logged.set_run(name)

    def on_step(self, event: StepEvent) -> None:
        if metrics := self._logged.of_step(event):
            self._run.log(metrics, step=event.step)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        if metrics := self._logged.of_evaluation(event):
            self._run.log(metrics, step=event.step)

    def on_end(self, event: EndEvent) -> None:
        import trackio

        trackio.finish()
        self._logged.close()
