"""Task scheduler: the torch scheduler of a task in a run.

Law: `lr_schedule` replaces the task's own schedule or scheduler; scale and warm-up multiply it.
"""

from torch.optim import Optimizer

from fourfold.optim.lr_scheduler import SteppedScheduler
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.words.errors import Problem, SettingError
from fourfold.words.task import Task


def make_scheduler(
    task: Task, optimizer: Optimizer, *, steps: int, rates: LRSchedule | None
) -> SteppedScheduler | None:
    """The task's scheduler, over this optimizer; None if it has none, or `rates` replace it. Raises TaskError."""
    if task.scheduler is None or (rates is not None and rates.schedule is not None):
        return None
    return SteppedScheduler(task.scheduler, optimizer, steps=steps)


def check_evaluations(scheduler: SteppedScheduler | None, *, evaluate_every: int | None, has_valid: bool) -> None:
    """Raise SettingError for a scheduler that follows a validation loss which is never measured."""
    if scheduler is None or not scheduler.is_plateau or (evaluate_every and has_valid):
        return
    got = f"scheduler = {scheduler.name}, " + ("evaluate_every = none" if has_valid else "no validation data")
    attempt = "evaluate_every=100" if has_valid else "ff.Data(train=…, valid=…)"
    raise SettingError(Problem(got, "evaluations: it follows the validation loss", attempt), where="the settings")
