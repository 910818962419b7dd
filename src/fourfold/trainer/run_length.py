"""Run length: how many steps of which batches a run has, once its data is open.

Law: epochs are whole numbers of steps, for no batch has samples of two epochs.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from fourfold.feed.data_input import DataInput
from fourfold.orders.sample_order import num_batches
from fourfold.plan.plan import Plan
from fourfold.trainer.lr_factors import lr_factors
from fourfold.trainer.settings import Settings
from fourfold.words.errors import Problem, SettingError
from fourfold.words.field import declare
from fourfold.words.task import DEFAULT_BATCH_SIZE, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Settings whose steps and batch size are known, as the data of the run gives them."""

    if TYPE_CHECKING:
        steps: int = declare()
        batch_size: int = declare()


def with_sizes(settings: Settings, task: Task, data: DataInput) -> RunSettings:
    """The settings with the steps, batch size and drop_last that the training data gives where they are None.

    Raises SettingError for epochs over data without a length, or without a whole batch.
    """
    sizes: dict[str, Any] = {
        "batch_size": settings.batch_size or data.batch_size or DEFAULT_BATCH_SIZE,
        "drop_last": bool(data.drop_last if settings.drop_last is None else settings.drop_last),
    }
    if settings.epochs is not None:
        sizes["steps"] = settings.epochs * _batches_per_epoch(settings.epochs, data, **sizes)
    run = RunSettings(**{**vars(settings), **sizes})
    lr_factors(task, steps=run.steps, batch_size=run.batch_size, rates=run.rates)
    return run


def _batches_per_epoch(epochs: int, data: DataInput, *, batch_size: int, drop_last: bool) -> int:
    if data.num_samples is None:
        got = f"epochs = {epochs}, and training data that does not say how long it is"
        need = "its length, from which the steps follow"
        raise SettingError(Problem(got, need, "steps=…, or a dataset with __len__"), where="the settings")
    if found := num_batches(data.num_samples, batch_size, drop_last=drop_last):
        return found
    got = f"{data.num_samples} samples, batch_size = {batch_size} and drop_last"
    attempt = f"batch_size={data.num_samples}, or drop_last=false"
    raise SettingError(Problem(got, "at least one whole batch", attempt), where="the settings")


def format_epochs(settings: RunSettings, data: DataInput) -> str | None:
    """How many steps a number of epochs means; None where steps are given."""
    if settings.epochs is None:
        return None
    each = settings.steps // settings.epochs
    return (
        f"{settings.epochs} epoch{'s' if settings.epochs > 1 else ''} of {data.num_samples:,} samples, in batches of "
        f"{settings.batch_size:,}: {each:,} steps each, {settings.steps:,} in all"
    )


def check_steps(steps: int | None, plan: Plan) -> None:
    """Raise SettingError where a run would end between two synchronizations of its local steps; None: not known."""
    period = plan.sync_interval
    if steps is None or steps % period == 0:
        return
    below = steps // period * period
    fitting = f"steps={below} or {below + period}" if below else f"steps={period}"
    if (divisor := max(each for each in range(1, period) if steps % each == 0)) > 1:
        fitting += f", or local_steps={divisor}"
    got, need = f"steps = {steps}, local_steps = {period}", "a number of steps divisible by local_steps"
    raise SettingError(Problem(got, need, fitting), where="the settings")


def format_delayed(settings: Settings, plan: Plan) -> str | None:
    """Which evaluations or checkpoints come later than asked for, because ranks have the same weights only then."""
    asked = {"checkpoint_every": settings.checkpoint_every, "evaluate_every": settings.evaluate_every or 0}
    delayed = [f"{name} = {every}" for name, every in asked.items() if every % plan.sync_interval]
    if not delayed:
        return None
    return (
        f"{' and '.join(delayed)}: done at the next multiple of {plan.sync_interval}, where ranks have the same weights"
    )
