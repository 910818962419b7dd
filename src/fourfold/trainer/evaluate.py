"""Evaluation: the mean loss and the task's measures over a whole data source.

Law: the data ranks share the source, every rank runs the same number of forwards, and all get the same numbers.
"""

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fourfold.feed.sample_rng import fetch_seeded
from fourfold.plan.sample_order import shard_range
from fourfold.step.model_call import eval_mode
from fourfold.step.same_source import check_same_length
from fourfold.step.step_runner import ForwardRun
from fourfold.step.train_step import TrainStep
from fourfold.step.uneven_means import is_uneven, uneven_problem
from fourfold.words.errors import Problem, TaskError
from fourfold.words.task import Source, Task


def evaluate(step: TrainStep, task: Task, source: Source, batch_size: int) -> dict[str, float]:
    """Mean loss and the task's measures over `source`, which the data ranks share. Collective.

    Raises TaskError on every rank if ranks have sources of different lengths. Raises it also if data ranks share the
    source and the loss is one number, made of means over different counts: its mean would depend on the mesh.
    """
    totals = evaluate_sums(step, task, source, batch_size)
    return {name: total / count for name, (total, count) in totals.items() if count}


@torch.no_grad()
def evaluate_sums(step: TrainStep, task: Task, source: Source, batch_size: int) -> dict[str, list[float]]:
    """The sum and the count of each measure, which may be 0: see `evaluate`. Collective."""
    uneven_by = torch.zeros(3, dtype=torch.float64)
    sums: dict[str, list[float]] = {}
    step.flush()
    check_same_length(step.all_gather_json(len(source)), "validation data")
    start, stop = shard_range(0, len(source), step.plan.dp, step.dp_index)
    local_batch_size = max(1, batch_size // step.plan.dp)
    fetch = functools.partial(fetch_seeded, source, seed=0, epoch=0)
    step.dry_run(fetch(range(start, min(start + local_batch_size, stop)))[0])
    with eval_mode(step.model):
        # As many iterations on every rank: with sharded weights all ranks take part in every unshard.
        longest = max(len(range(*shard_range(0, len(source), step.plan.dp, rank))) for rank in range(step.plan.dp))
        for first in range(start, start + longest, local_batch_size):
            batch = fetch(range(first, min(first + local_batch_size, stop)))[0] if first < stop else None
            run = step.run_forward(batch)
            if run is not None:
                counts = map(float, (run.loss.count, run.loss.other_count, run.loss.other_square))
                uneven_by += torch.tensor(list(counts), dtype=torch.float64)
                _add_pairs(sums, _batch_metrics(run, task))
    if step.plan.dp > 1 and is_uneven(*step.all_reduce(uneven_by)):
        raise TaskError(uneven_problem(step.objective.loss_names), where="the validation loss")
    totals: dict[str, list[float]] = {}
    for rank_sums in step.all_gather_json(sums):
        _add_pairs(totals, rank_sums)
    return totals


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
    own = task.evaluate(run.outputs, targets) if task.evaluate is not None else {}
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
