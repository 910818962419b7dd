"""Early stopping: the run ends when its validation no longer improves.

patience  how many evaluations in a row may bring no improvement
Law: all ranks stop after the evaluation that exhausts the patience; a resumed run stops where the undisturbed one does.
"""

from typing import Any

from fourfold.words import argument_checks
from fourfold.words.callback import Callback, EvaluateEvent, StartEvent
from fourfold.words.errors import Problem, SettingError
from fourfold.words.measures import MODES, is_better


class EarlyStopping(Callback):
    """Stops a run whose `metric` has not improved by more than `min_delta` in `patience` evaluations.

    metric     a validation measure: "loss", or one of the task's own
    mode       "min": it improves as it falls; "max": as it rises
    min_delta  in the units of the measure
    A value that is not a number is no improvement.
    """

    def __init__(self, metric: str = "loss", *, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        """Raises SettingError with all problems."""
        problems = argument_checks.str_problems("metric", metric)
        problems += argument_checks.int_problems("patience", patience, minimum=1)
        if mode not in MODES:
            problems.append(Problem(argument_checks.format_argument("mode", mode), "min or max", "mode=max"))
        if not argument_checks.is_real(min_delta) or min_delta < 0:
            got = argument_checks.format_argument("min_delta", min_delta)
            problems.append(Problem(got, "a number of at least 0", "min_delta=0.001"))
        if problems:
            raise SettingError(problems, where="EarlyStopping")
        self._metric, self._patience, self._mode, self._min_delta = metric, patience, mode, float(min_delta)
        self.required_metrics = (metric,)
        self._best: float | None = None
        self._num_bad = 0

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "mode": self._mode, "best": self._best, "num_bad": self._num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["metric"], state["mode"]) == (self._metric, self._mode):  # else it watches something new
            self._best, self._num_bad = state["best"], state["num_bad"]

    def on_start(self, event: StartEvent) -> None:
        self._stop_if_exhausted()

    def on_evaluate(self, event: EvaluateEvent) -> None:
        value = event.metrics.get(self._metric)
        if is_better(value, self._best, self._mode, min_delta=self._min_delta):
            self._best, self._num_bad = value, 0
        else:
            self._num_bad += 1
        self._stop_if_exhausted()

    def _stop_if_exhausted(self) -> None:
        if self._num_bad >= self._patience:
            times = "1 evaluation" if self._num_bad == 1 else f"{self._num_bad} evaluations"
            best = "it was never a number" if self._best is None else f"best {self._best:.4g}"
            self.request_stop(f"validation {self._metric} has not improved for {times} ({best})")
