"""Evaluate: mean loss and a task's measures over a whole source."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from fourfold.feed.sample_rng import fetch_seeded
from fourfold.plan.sample_order import shard_range
from fourfold.step.batch import Loss, eval_mode
from fourfold.step.build import TrainStep
from fourfold.step.objective import is_uneven, uneven_problem
from fourfold.step.same_source import check_same_length
from fourfold.words.errors import Problem, TaskError
from fourfold.words.task import Source, Task


def _is_number_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    """Whether it is one number, of whatever library."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        float(value)
        return not isinstance(value, str)
    return False


@torch.no_grad()
def evaluate(step: TrainStep, task: Task, source: Source, batch_size: int) -> dict[str, float]:
    """Mean loss and the task's measures over a whole source, which the data ranks share. Collective.

    Raises TaskError, on every rank, where ranks have sources of other lengths; and where the loss is one number made of
    means whose counts part ways, and ranks share the source: then other ranks would give another number.
    """
    uneven_by = torch.zeros(3, dtype=torch.float64)
    sums: dict[str, list[float]] = {}
    step.flush()
    check_same_length(step.all_gather_json(len(source)), "validation data")
    start, stop = shard_range(0, len(source), step.plan.dp, step.dp_index)
    each = max(1, batch_size // step.plan.dp)
    draw = functools.partial(fetch_seeded, source, seed=0, epoch=0)
    step.dry_run(draw(range(start, min(start + each, stop)))[0])
    with eval_mode(step.model):
        # As many times on every rank: all of them bring the weights, where those rest split.
        longest = max(len(range(*shard_range(0, len(source), step.plan.dp, rank))) for rank in range(step.plan.dp))
        for first in range(start, start + longest, each):
            batch = draw(range(first, min(first + each, stop)))[0] if first < stop else None
            with step.unsharded():
                loss, found = (None, {}) if batch is None else _batch_metrics(step, task, batch)
            if loss is not None:
                uneven_by += torch.tensor(
                    list(map(float, (loss.count, loss.other_count, loss.other_square))), dtype=torch.float64
                )
            for name, (total, count) in found.items():
                held = sums.setdefault(name, [0.0, 0.0])
                held[0] += float(total)
                held[1] += float(count)
    if step.plan.dp > 1 and is_uneven(*step.all_reduce(uneven_by)):
        raise TaskError(uneven_problem(step.objective.loss_names), where="the validation loss")
    everyone: dict[str, list[float]] = {}
    for theirs in step.all_gather_json(sums):
        for name, (total, count) in theirs.items():
            held = everyone.setdefault(name, [0.0, 0.0])
            held[0] += total
            held[1] += count
    return {name: total / count for name, (total, count) in everyone.items() if count}


def _batch_metrics(step: TrainStep, task: Task, batch: Any) -> tuple[Loss, dict[str, Sequence[Any]]]:
    part, measured = step.run_forward(batch)
    # Of a model with a loss of its own the labels are among the inputs.
    targets = part.inputs if part.targets is None else part.targets
    extra = task.evaluate(measured.outputs, targets) if task.evaluate is not None else {}
    if not isinstance(extra, dict) or not all(isinstance(k, str) and _is_number_pair(v) for k, v in extra.items()):
        need = "a dict from names to pairs (sum, count)"
        raise TaskError(Problem("what the task's evaluate returned", need, '{"accuracy": (num_right, num_samples)}'))
    return measured.loss, {"loss": (measured.loss.total, measured.loss.count), **extra}
