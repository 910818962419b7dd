"""Evaluation: the mean loss and the task's measures over a whole data source, and which of them a run must have.

need  a measure by which callbacks act, or checkpoints are chosen
Law: the data ranks share the source, every rank runs the same number of forwards, and all get the same numbers.
Batches are read ahead, and once for the ranks of a host that need the same ones. A measure that does not exist is
refused before the first step, on every rank, with the names that there are.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import Dataset, Subset

from fourfold.feed.data_input import DataInput, TaskInputs, open_input
from fourfold.feed.evaluation_batches import EvaluationBatch, EvaluationBatches
from fourfold.feed.stream import Stream
from fourfold.model.loss_sum import is_uneven, uneven_problem
from fourfold.model.model_call import eval_mode
from fourfold.plan.damaged_samples import DamagedRecord, records_of_ranks
from fourfold.proof.digests.batches import check_same_length, check_same_source
from fourfold.step.step_runner import ForwardRun
from fourfold.step.train_step import TrainStep
from fourfold.trainer.run_length import RunSettings
from fourfold.trainer.settings import Settings
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import Problem, SettingError, TaskError, closest_match
from fourfold.words.task import Task

# ---- the evaluation --------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """The means of the measures, and the samples that are left out of them because they are damaged."""

    metrics: dict[str, float]
    damaged: tuple[DamagedRecord, ...]


def evaluate(step: TrainStep, task: Task, data: Any, batch_size: int) -> Evaluation:
    """Mean loss and the task's measures over the samples of `data`, which the data ranks share. Collective.

    Damaged samples are left out, and returned: how many there may be is the caller's to say.

    Raises TaskError on every rank if ranks have sources of different lengths. Raises it also if data ranks share the
    source and the loss is one number, made of means over different counts: its mean would depend on the mesh.
    """
    totals, damaged = _evaluate_sums(step, task, data, batch_size)
    return Evaluation({name: total / count for name, (total, count) in totals.items() if count}, damaged)


@torch.no_grad()
def _evaluate_sums(
    step: TrainStep, task: Task, data: Any, batch_size: int
) -> tuple[dict[str, list[float]], tuple[DamagedRecord, ...]]:
    """The sum and the count of each measure, which may be 0, and the damaged samples: see `evaluate`. Collective."""
    damaged: list[DamagedRecord] = []
    uneven_by = torch.zeros(3, dtype=torch.float64)
    sums: dict[str, list[float]] = {}
    step.flush()
    with contextlib.closing(_local_batches(step, open_input(data, "validation data"), batch_size)) as batches:
        first = next(batches)
        step.dry_run(first.values)
        with eval_mode(step.model):
            # As many iterations on every rank: with sharded weights all ranks take part in every unshard.
            for batch in itertools.chain([first], batches):
                damaged += batch.damaged
                run = step.run_forward(None if batch.is_empty else batch.values)
                if run is not None:
                    counts = map(float, (run.loss.count, run.loss.other_count, run.loss.other_square))
                    uneven_by += torch.tensor(list(counts), dtype=torch.float64)
                    _add_pairs(sums, _batch_metrics(run, task))
    if not step.adds_totals:  # another rank has the same samples and adds their sums
        sums, uneven_by = {}, torch.zeros_like(uneven_by)
    if step.plan.dp > 1 and is_uneven(*step.all_reduce(uneven_by)):
        raise TaskError(uneven_problem(step.objective.loss_names), where="the validation loss")
    totals: dict[str, list[float]] = {}
    by_rank = step.all_gather_json([sums, damaged])
    for rank_sums, _ in by_rank:
        _add_pairs(totals, rank_sums)
    return totals, records_of_ranks(each for _, each in by_rank)


def _local_batches(step: TrainStep, data: DataInput, batch_size: int) -> Generator[EvaluationBatch, None, None]:
    """This rank's batches, as many on every rank; the first one is never None. Collective."""
    dp, is_stream = step.plan.dp, isinstance(data.source, Stream)
    if not isinstance(data.source, Stream):
        check_same_length(step.all_gather_json(len(data.source)), "validation data")
    pieces = EvaluationBatches(data, data.batch_size or batch_size, size=dp, index=step.dp_index)
    if step.plan.mesh.size > dp:
        pieces.share_reads(step.communicator)
    with contextlib.closing(pieces.read_ahead(step.check_peers)) as batches:
        for number, batch in enumerate(batches):
            if number == 0 and is_stream and dp > 1:
                check_same_source(step.all_gather_json(batch.probe))
            yield batch


def _add_pairs(sums: dict[str, list[float]], pairs: Mapping[str, Iterable[Any]]) -> None:
    """Add each (sum, count) to that of its name."""
    for name, (total, count) in pairs.items():
        pair = sums.setdefault(name, [0.0, 0.0])
        pair[0] += float(total)
        pair[1] += float(count)


def _batch_metrics(run: ForwardRun, task: Task) -> dict[str, Sequence[Any]]:
    """The loss and the task's measures of a batch, as pairs (sum, count)."""
    # A model that computes its own loss has the labels among its inputs.
    targets = run.part.inputs if run.part.targets is None else run.part.targets
    own: Any = {}
    if task.evaluate is not None:
        with noting(f"  in the task's evaluate, {describe_function(task.evaluate)}"):
            own = task.evaluate(run.outputs, targets)
    if not isinstance(own, dict) or not all(isinstance(k, str) and _is_number_pair(v) for k, v in own.items()):
        need = "a dict from names to pairs (sum, count)"
        raise TaskError(Problem("what the task's evaluate returned", need, '{"accuracy": (num_right, num_samples)}'))
    return {"loss": (run.loss.total, run.loss.count), **own}


def _is_number_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    """Whether the value is one number, of any library."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        float(value)
        return not isinstance(value, str)
    return False


# ---- whether a run measures what it is chosen by ---------------------------------------------------------------------


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
    found, _ = _evaluate_sums(step, task, _head(data.valid, settings.batch_size), settings.batch_size)
    names = [*found, *(f"ema {name}" for name in found if settings.ema is not None)]
    check_metrics(needs, names)


def _head(data: DataInput, num_samples: int) -> DataInput:
    """The first samples, read in this process."""
    source = data.source
    if isinstance(source, Stream):
        return dataclasses.replace(data, source=source.head(num_samples), workers=None)
    head = Subset(cast(Dataset[Any], source), range(min(num_samples, len(source))))
    return dataclasses.replace(data, source=head, workers=None)
