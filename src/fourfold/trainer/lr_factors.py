"""Learning-rate factors: what a run multiplies the optimizer's rates by at each step."""

import functools

from fourfold.plan.lr_schedule import LRLambda, LRSchedule
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import Problem, SettingError
from fourfold.words.task import Task


def lr_factors(task: Task, *, steps: int, batch_size: int, rates: LRSchedule | None) -> LRLambda | None:
    """The factor of the learning rate at each step; None where the optimizer's rates stay as they are.

    Raises SettingError where `rates` does not fit the run.
    """
    task_schedule = None if task.schedule is None else functools.partial(task_lr_factor, task, steps)
    if rates is None:
        return task_schedule
    return rates.lr_lambda(
        steps=steps, batch_size=batch_size, tuned_batch_size=tuned_batch_size(task), task_schedule=task_schedule
    )


def task_lr_factor(task: Task, steps: int, step: int) -> float:
    """What the task's schedule returns for a step."""
    assert task.schedule is not None
    with noting(f"  in the task's schedule, {describe_function(task.schedule)}"):
        return task.schedule(step, steps)


def tuned_batch_size(task: Task) -> int | None:
    """The global batch size that the task's rate was tuned for; None if the task does not say."""
    return task.batch_size if task.tuned_for is None else task.tuned_for


def check_tuned_size(task: Task, rates: LRSchedule | None) -> None:
    """Raise SettingError if the learning rate is to be scaled from a batch size that is not known."""
    if rates is None or rates.scale == "none" or rates.batch_size is not None or tuned_batch_size(task) is not None:
        return
    got = f"lr_scale = {rates.scale}, and a task without a batch size"
    need = "the one that the learning rate was tuned for"
    raise SettingError(Problem(got, need, "lr_batch_size=32, or tuned_for=32 in the task"), where="the settings")
