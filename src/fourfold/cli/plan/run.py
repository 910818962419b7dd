"""Plan of a run: what other plans a run of `fourfold train` could have had, and how its own was predicted.

Law: a run is asked again with its own settings; only fields that do not change what is trained are open.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.cli.plan.arguments import NO_FILE, PlanArguments
from fourfold.cli.settings_file import read_settings_file
from fourfold.environment.atomic_file import write_atomically
from fourfold.plan.ask import SEARCHED
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.planner.plan_text import format_difference, plan_words
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.decision import Decision
from fourfold.words.errors import FourfoldError, Problem, SettingError, os_error_text
from fourfold.words.run_files import CONFIG_FILE, LOG_FILE, PLAN_FILE, PREDICTION_FILE, RUNS_DIR
from fourfold.words.units import format_step_seconds

if TYPE_CHECKING:
    from fourfold.cli.job import Job
    from fourfold.cli.plan.question import Question


OWN_PLAN = "the run's own plan"
NUM_LEFT_OUT = 1  # the first step allocates


@dataclass(frozen=True)
class PlannedRun:
    """A run that has been trained: its folder, its plan, the median seconds of its steps (None: it has none)."""

    folder: Path
    plan: Plan
    seconds: float | None

    def arguments(self, given: PlanArguments) -> PlanArguments:
        """The words with which this run's task is planned again, on as many devices unless they say otherwise."""
        file = read_settings_file(str(self.folder / CONFIG_FILE))
        run = dataclasses.replace(given.run, named_task=None, settings_file=file)
        devices = {} if "devices" in given.own else {"devices": [self.plan.mesh.size]}
        out = {} if "out" in given.own else {"out": NO_FILE}
        return dataclasses.replace(given, own={**given.own, **devices, **out}, run=run, kept=self.pinned)

    @property
    def pinned(self) -> dict[str, object]:
        """The fields that stay as they are: they are part of what was trained, or the planner does not choose them."""
        default = Plan()
        names = [name for name in FIELDS if name not in SEARCHED]
        return {name: getattr(self.plan, name) for name in names if getattr(self.plan, name) != getattr(default, name)}


def beside(run: PlannedRun, decision: Decision, own: Prediction) -> Decision:
    """The decision with the run's own plan among the baselines."""
    return dataclasses.replace(decision, baselines={OWN_PLAN: own, **decision.baselines})


def format_run(run: PlannedRun, own: Prediction) -> str:
    """What the run took beside what its plan was predicted to take."""
    text = f"{run.folder} · {plan_words(run.plan)} · predicted {format_step_seconds(own.seconds)} a step"
    if run.seconds is None:
        return f"{text}, none measured"
    off = format_difference(own.seconds, run.seconds)
    return f"{text}, measured {format_step_seconds(run.seconds)} (the prediction is off by {off})"


def find_planned_run(word: str | None) -> PlannedRun | None:
    """The run of this name or folder; None if there is none. Raises FourfoldError for one that cannot be read."""
    if word is None:
        return None
    folder = next((path for path in (Path(word), Path(RUNS_DIR, word)) if (path / PLAN_FILE).is_file()), None)
    if folder is None:
        return None
    if not (folder / CONFIG_FILE).is_file():
        got = f"{folder} has no {CONFIG_FILE}"
        need = "a run of fourfold train, which writes its settings there"
        raise SettingError(Problem(got, need, "fourfold plan TASK with its settings"), where=str(folder))
    plan = Plan.from_toml((folder / PLAN_FILE).read_text(encoding="utf-8"), where=str(folder / PLAN_FILE))
    return PlannedRun(folder, plan, median_step_seconds(folder / LOG_FILE))


def median_step_seconds(log: Path) -> float | None:
    """The median seconds of a run's steps, as rank 0 has logged them; None without steps."""
    from fourfold.report.run_record import read_log

    if not log.is_file():
        return None
    seconds: Sequence[float] = [line["seconds"] for line in read_log(log) if "loss" in line and "step" in line]
    return statistics.median(seconds[NUM_LEFT_OUT:] or seconds) if seconds else None


# ---- beside a run, and in `fourfold show` ----------------------------------------------------------------------------


def question_here(prepared: "Job") -> "Question | None":
    """The question of a job's task on its ranks of this machine; None where it is not calibrated for that."""
    from fourfold.cli.plan.machine import calibrated_machine
    from fourfold.cli.plan.question import Question, with_batch_size
    from fourfold.plan.ask import Ask
    from fourfold.planner.task_facts.source import TaskFacts

    source = TaskFacts(with_batch_size(prepared.task, prepared.task_name))
    machine = calibrated_machine(source, prepared.num_processes)
    if machine is None:
        return None
    return Question(prepared.task_name, True, source, machine, Ask(devices=prepared.num_processes))


def record_prediction(prepared: "Job", folder: Path) -> str | None:
    """Write what the plan was predicted to take into a run's folder; returns the line to print, None without one.

    A prediction that cannot be made or written does not make the run fail: the line says why.
    """
    from fourfold.planner.plan_text import format_difference
    from fourfold.planner.predict.prediction import RecordedPrediction, encode_prediction

    try:
        question = question_here(prepared)
        if question is None:
            return None
        prediction = question.predict(prepared.plan)
        recorded = RecordedPrediction(prediction, question.machine.text)
        write_atomically(folder / PREDICTION_FILE, encode_prediction(recorded))
        measured = median_step_seconds(folder / LOG_FILE)
    except FourfoldError as error:
        return f"no prediction: {error}"
    except OSError as error:
        return f"no prediction: {PREDICTION_FILE} could not be written: {os_error_text(error)}"
    text = f"step     predicted {format_step_seconds(prediction.seconds)}"
    if measured is None:
        return text
    return f"{text}, measured {format_step_seconds(measured)}: {format_difference(prediction.seconds, measured)}"


def describe_prediction(prepared: "Job") -> str:
    """The section of `fourfold show` with what the plan will take here; "" where this machine is not calibrated.

    The rest of what is shown needs no calibration: if it cannot be used, the section says why.
    """
    from fourfold.planner.plan_text import format_prediction

    try:
        question = question_here(prepared)
        if question is None:
            return ""
        return "\n\n" + format_prediction(question.predict(prepared.plan), question.workload)
    except FourfoldError as error:
        return f"\n\nprediction   none: {error}"
