"""Trackio: a run in its local database, or on a Hugging Face Space, for each run here.

Law: a run that resumes goes on under its name, and logs no step twice.
"""

import secrets
from typing import Any

from fourfold.trainer.callbacks.logged_run import (
    LoggedRun,
    check_every,
    check_installed,
    evaluate_metrics,
    is_logged,
    run_config,
    step_metrics,
)
from fourfold.words.callback import Callback, EndEvent, EvaluateEvent, StartEvent, StepEvent


class Trackio(Callback):
    """Logs to Trackio; `trackio show --project fourfold` shows it.

    space_id  of a Hugging Face Space; None: what TRACKIO_SPACE_ID says, else Trackio's database on this machine
    every     steps between those that are logged; the first is always logged
    """

    def __init__(self, project: str = "fourfold", *, space_id: str | None = None, every: int = 1) -> None:
        """Raises SettingError if trackio is not installed, or for an impossible `every`."""
        check_every(every, callback="Trackio")
        check_installed("trackio", "trackio", callback="Trackio")
        self._project, self._space_id, self._every = project, space_id, every
        self._run: Any = None
        self._logged: LoggedRun | None = None

    def on_start(self, event: StartEvent) -> None:
        import trackio

        self._logged = logged = LoggedRun(event.folder, "trackio", step=event.step)
        # Names are what Trackio resumes by, and folders of two machines may have the same.
        name = logged.run_id or f"{event.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=self._project,
            name=name,
            space_id=self._space_id,
            config=run_config(event),
            resume="allow",
            embed=False,  # no dashboard is started
        )
        logged.set_run(name)

    def on_step(self, event: StepEvent) -> None:
        if self._logged is not None and is_logged(event.step, self._every) and self._logged.take_step(event.step):
            self._run.log(step_metrics(event), step=event.step)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        if self._logged is not None and self._logged.take_evaluation(event.step):
            self._run.log(evaluate_metrics(event), step=event.step)

    def on_end(self, event: EndEvent) -> None:
        import trackio

        trackio.finish()
        if self._logged is not None:
            self._logged.close()
