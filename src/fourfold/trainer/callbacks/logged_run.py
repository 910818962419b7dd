"""Logged runs: which run of a service a folder belongs to, and what all loggers write there under which names.

    runs/NAME/callbacks/wandb.json   {"run": "1b0c…", "step": 120, "evaluated": 100}

Law: no step is logged twice. After a restart from an older checkpoint, the steps that are logged already are trained
again but not logged again: such services can append, and not replace. All loggers use the same names; what a step did
not measure has no value, and is left out.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from fourfold.words import argument_checks
from fourfold.words.callback import EvaluateEvent, StartEvent, StepEvent
from fourfold.words.errors import Problem, SettingError

# ---- the run ---------------------------------------------------------------------------------------------------------


FOLDER = "callbacks"
STEP_DIGITS = 12  # the file keeps its length, so that a step is noted in place


class LoggedRun:
    """What a file in the run's folder says, and what is written to it. The file stays open until `close`."""

    def __init__(self, folder: Path, service: str, *, step: int, every: int = 1) -> None:
        """Open the file, or make one for a run that begins after `step`. Raises OSError, and ValueError if damaged.

        every  steps between those that are logged
        """
        path = folder / FOLDER / f"{service}.json"
        path.parent.mkdir(exist_ok=True)
        self.run_id = ""
        """The service's name for the run; "" if it has none yet."""
        self._step = self._evaluated = step
        self._every = every
        if path.exists():
            self._read(path)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def _read(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text())
            self.run_id, self._step, self._evaluated = str(record["run"]), int(record["step"]), int(record["evaluated"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged; without it, a new run starts there") from None

    def set_run(self, run_id: str) -> None:
        """From now on the folder belongs to this run of the service."""
        self.run_id = run_id
        os.ftruncate(self._file, 0)
        self._write()

    def take_step(self, step: int) -> bool:
        """Whether a step is still to be logged; from now on it is not."""
        if step <= self._step:
            return False
        self._step = step
        self._write()
        return True

    def take_evaluation(self, step: int) -> bool:
        """Whether the evaluation after a step is still to be logged; from now on it is not."""
        if step <= self._evaluated:
            return False
        self._evaluated = step
        self._write()
        return True

    def of_step(self, event: StepEvent) -> dict[str, float]:
        """What is still to be logged of a step; from now on nothing is."""
        is_due = is_logged(event.step, self._every) and self.take_step(event.step)
        return step_metrics(event) if is_due else {}

    def of_evaluation(self, event: EvaluateEvent) -> dict[str, float]:
        """What is still to be logged of an evaluation; from now on nothing is."""
        return evaluate_metrics(event) if self.take_evaluation(event.step) else {}

    def _write(self) -> None:
        # Before the step is logged: a process killed in between loses a step there, and doubles none.
        record = f'{{"run": {json.dumps(self.run_id)}, "step": {self._step:{STEP_DIGITS}}, '
        record += f'"evaluated": {self._evaluated:{STEP_DIGITS}}}}\n'
        os.pwrite(self._file, record.encode(), 0)

    def close(self) -> None:
        os.close(self._file)


# ---- its steps and evaluations ---------------------------------------------------------------------------------------


def is_logged(step: int, every: int) -> bool:
    """Whether a step is logged: the first, and every so many."""
    return step == 1 or step % every == 0


def step_metrics(event: StepEvent) -> dict[str, float]:
    """`train/lr`, `train/tokens_per_second` …; unless it was skipped `train/loss`, and `train/grad_norm` if known."""
    metrics = {"train/lr": event.lr, f"train/{event.unit}_per_second": event.units_per_second}
    trained = {} if event.skipped else {"train/loss": event.loss, "train/grad_norm": event.grad_norm}
    return metrics | {name: value for name, value in trained.items() if value is not None}


def evaluate_metrics(event: EvaluateEvent) -> dict[str, float]:
    """`valid/loss`, and the task's own measures."""
    return {f"valid/{name}": value for name, value in event.metrics.items()}


def run_config(event: StartEvent) -> dict[str, Any]:
    """The settings of the run; under `task_arguments` the task's arguments, under `plan` the plan's fields."""
    return {**event.settings, "num_ranks": event.num_ranks, "plan": dict(event.plan)}


# ---- what a constructor checks ---------------------------------------------------------------------------------------


def check_logger(package: str, every: int, *, callback: str) -> None:
    """Raise SettingError unless every so many steps can be logged, and for a package that is missing. Imports nothing.

    The error has the line that installs the package.
    """
    if problems := argument_checks.int_problems("every", every, minimum=1, attempt="every=10"):
        raise SettingError(problems, where=callback)
    if importlib.util.find_spec(package) is None:
        problem = Problem(
            f"{callback}, and {package} is not installed", f"the package {package}", f"pip install {package}"
        )
        raise SettingError(problem, where="callbacks")
