"""Metric checks: whether a run measures what its callbacks and its checkpoints are chosen by.

Law: a measure that does not exist is refused before the first step, on every rank, with the names that there are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.feed.data_input import DataInput, TaskInputs
from fourfold.feed.stream import Stream
from fourfold.step.train_step import TrainStep
from fourfold.trainer.evaluate import evaluate_sums
from fourfold.trainer.run_length import RunSettings
from fourfold.trainer.settings import Settings
from fourfold.words.errors import Problem, SettingError, closest_match
from fourfold.words.task import Source, Task

NEEDS = Mapping[str, Sequence[str]]
"""The measures that are needed, by what needs them."""


def metric_needs(settings: Settings, by_callback: NEEDS) -> NEEDS:
    """What the run needs: for its callbacks, and to choose its best checkpoints by."""
    # By default checkpoints are chosen by the loss, where there is one; any other measure was asked for.
    own = {} if settings.best_metric == "loss" else {f"best_metric = {settings.best_metric}": [settings.best_metric]}
    return {**own, **by_callback}


def check_evaluations(needs: NEEDS, task: Task, data: TaskInputs, settings: RunSettings) -> None:
    """Raise SettingError for needs that no evaluation can meet, as far as that is known without one."""
    problems = []
    for name in needs:
        if data.valid is None:
            problems.append(
                Problem(f"{name}, without validation data", "validation data in the task", "ff.Data(train=…, valid=…)")
            )
        elif not settings.evaluate_every:
            attempt = f"evaluate_every={max(1, settings.steps // 20)}"
            problems.append(Problem(f"{name}, without evaluate_every", "evaluations during the run", attempt))
    if problems:
        raise SettingError(problems, where="the settings")
    if task.evaluate is None:
        check_metrics(needs, ["loss", "ema loss"] if settings.ema is not None else ["loss"])


def check_metrics(needs: NEEDS, known: Sequence[str]) -> None:
    """Raise SettingError for every measure that is not among the known ones."""
    problems = []
    for by, metrics in needs.items():
        for metric in metrics:
            if metric not in known:
                got = by if by.endswith(f"= {metric}") else f"the metric {metric!r} for {by}"
                is_setting = got.startswith("best_metric = ")
                close = closest_match(metric, known) or known[0]
                need = f"one of {', '.join(known)}" if len(known) > 1 else f"{known[0]}: the task has no other"
                problems.append(Problem(got, need, f"best_metric={close}" if is_setting else close))
    if problems:
        raise SettingError(problems, where="the settings")


def check_measured(needs: NEEDS, step: TrainStep, task: Task, data: TaskInputs, settings: RunSettings) -> None:
    """Raise SettingError, on every rank, for a measure that the task does not have. Collective.

    Evaluates one batch, if the names are not known without that.
    """
    check_evaluations(needs, task, data, settings)
    if not needs or task.evaluate is None or data.valid is None:
        return
    found = evaluate_sums(step, task, _head(data.valid, settings.batch_size), settings.batch_size).sums
    names = [*found, *(f"ema {name}" for name in found if settings.ema is not None)]
    check_metrics(needs, names)


def _head(data: DataInput, num_samples: int) -> DataInput:
    """The first samples, read in this process."""
    source = data.source
    head = source.head(num_samples) if isinstance(source, Stream) else _Head(source, num_samples)
    return dataclasses.replace(data, source=head, workers=None)


class _Head:
    """The first samples of a source."""

    def __init__(self, source: Source, num_samples: int) -> None:
        self._source, self._num_samples = source, min(num_samples, len(source))

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return self._source[index]
