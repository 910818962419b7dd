"""Logged metrics: the names under which loggers write a step and an evaluation.

Law: all loggers use the same names; what a step did not measure has no value, and is left out.
"""

from typing import Any

from fourfold.words import argument_checks
from fourfold.words.callback import EvaluateEvent, StartEvent, StepEvent
from fourfold.words.errors import SettingError


def check_every(every: int, *, callback: str) -> None:
    """Raise SettingError unless every so many steps can be logged."""
    if problems := argument_checks.int_problems("every", every, minimum=1, attempt="every=10"):
        raise SettingError(problems, where=callback)


def is_logged(step: int, every: int) -> bool:
    """Whether a step is logged: the first, and every so many."""
    return step == 1 or step % every == 0


def step_metrics(event: StepEvent, *, unit: str) -> dict[str, float]:
    """`train/loss`, `train/lr`, `train/grad_norm` where it was measured, `train/tokens_per_second` …"""
    metrics = {"train/loss": event.loss, "train/lr": event.lr, f"train/{unit}_per_second": event.units_per_second}
    return metrics if event.grad_norm is None else {**metrics, "train/grad_norm": event.grad_norm}


def evaluate_metrics(event: EvaluateEvent) -> dict[str, float]:
    """`valid/loss`, and the task's own measures."""
    return {f"valid/{name}": value for name, value in event.metrics.items()}


def run_config(event: StartEvent) -> dict[str, Any]:
    """The settings of the run; under `task_arguments` the task's arguments, under `plan` the plan's fields."""
    return {**event.settings, "num_ranks": event.num_ranks, "plan": dict(event.plan)}
