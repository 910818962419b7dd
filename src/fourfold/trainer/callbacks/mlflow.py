"""MLflow: a run of an experiment for each run here, in a local store or on a server.

Law: a run that resumes goes on under the id that its folder keeps, and logs no step twice.
"""

import importlib.util
import time
from typing import Any

from fourfold.trainer.callbacks.logged_run import LoggedRun, check_logger, run_config
from fourfold.words.callback import Callback, EndEvent, EvaluateEvent, StartEvent, StepEvent
from fourfold.words.errors import Problem, SettingError

STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "terminated": "KILLED", "failed": "FAILED"}
MAX_PARAM_LENGTH = 6000  # MLflow refuses longer values
MAX_PARAMS = 100  # of a request
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # the schemes of stores that MLflow opens with SQLAlchemy
DATABASE_PACKAGES = ("sqlalchemy", "alembic")  # mlflow brings them, mlflow-skinny does not


class MLflow(Callback):
    """Logs to MLflow.

    tracking_uri  such as sqlite:///mlflow.db or http://host:5000; None: what MLFLOW_TRACKING_URI says, else MLflow's
                  own default
    every         steps between those that are logged; the first is always logged
    """

    def __init__(self, experiment: str = "fourfold", *, tracking_uri: str | None = None, every: int = 1) -> None:
        """Raises SettingError if mlflow, or what its store needs, is not installed, or for an impossible `every`."""
        check_logger("mlflow", every, callback="MLflow")
        _check_store(tracking_uri)
        self._experiment, self._tracking_uri, self._every = experiment, tracking_uri, every

    def on_start(self, event: StartEvent) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=self._tracking_uri)
        self._logged = LoggedRun(event.folder, "mlflow", step=event.step, every=self._every)
        if self._logged.run_id:
            self._client.update_run(self._logged.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        run_id = self._client.create_run(experiment, run_name=event.name).info.run_id
        self._logged.set_run(run_id)
        self._log_params(run_id, event)

    def _log_params(self, run_id: str, event: StartEvent) -> None:
        from mlflow.entities import Param

        values = run_config(event)
        values |= {f"plan.{name}": value for name, value in values.pop("plan").items()}
        params = [Param(name, str(value)[:MAX_PARAM_LENGTH]) for name, value in values.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + MAX_PARAMS])

    def on_step(self, event: StepEvent) -> None:
        self._log(self._logged.of_step(event), event.step)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        self._log(self._logged.of_evaluation(event), event.step)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, step) for name, value in metrics.items()]
        if rows:
            self._client.log_batch(self._logged.run_id, metrics=rows)

    def on_end(self, event: EndEvent) -> None:
        self._client.set_terminated(self._logged.run_id, STATUS[event.status])
        self._logged.close()


def _check_store(tracking_uri: str | None) -> None:
    """Raise SettingError if the store is a database, and the libraries that open it are missing."""
    missing = [name for name in DATABASE_PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return
    import mlflow

    uri = tracking_uri or mlflow.get_tracking_uri()
    if uri.partition(":")[0].partition("+")[0] in DATABASES:
        got = f"MLflow, whose store is {uri}, and {' and '.join(missing)} not installed"
        need = f"{' and '.join(DATABASE_PACKAGES)}, which mlflow-skinny does not bring"
        raise SettingError(Problem(got, need, f"pip install {' '.join(missing)}"), where="callbacks")
