"""Plan record: what a run's plan was predicted to take, written beside the run, and said beside what it took.

Law: a prediction needs a calibration of this machine for this task; without one nothing is said, and nothing measured.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.environment.atomic_file import write_atomically
from fourfold.words.errors import FourfoldError, os_error_text
from fourfold.words.run_files import LOG_FILE, PREDICTION_FILE
from fourfold.words.units import format_step_seconds

if TYPE_CHECKING:
    from fourfold.cli.job import Job
    from fourfold.cli.plan.question import Question


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
    from fourfold.cli.plan.run import median_step_seconds
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
