"""Time plans: how long a step of each of several plans takes here, on the ranks of this job.

round   each plan builds its step, and runs it a few times; the next round begins with the first plan again
Law: plans take turns, so that what else the machine does is shared among them; a plan's time is a median over rounds.
"""

import dataclasses
import gc
import statistics
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from fourfold.feed.data_input import DataInput, open_data
from fourfold.feed.feed import Feed
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.trainer.run_length import with_sizes
from fourfold.trainer.settings import make_settings
from fourfold.words.task import Task

ROUNDS, WARM_UP, STEPS = 3, 2, 5


def time_plans(task: Task, plans: Sequence[Plan], *, seed: int = 0) -> list[float]:
    """The seconds of a step of each plan, which all have as many ranks as this job. Collective.

    Raises what a training raises.
    """
    torch.manual_seed(seed)
    source = open_data(task.data(), where="the task's data").train
    sizes = with_sizes(make_settings(task), task, source)
    task = dataclasses.replace(task, batch_size=sizes.batch_size)
    seconds: list[list[float]] = [[] for _ in plans]
    for _ in range(ROUNDS):
        for plan, own in zip(plans, seconds, strict=True):
            own += _time_round(task, plan, source, seed=seed, drop_last=sizes.drop_last)
            gc.collect()  # a step is part of cycles, and holds its buffers until they are collected
    return [statistics.median(each) for each in seconds]


def _time_round(task: Task, plan: Plan, source: DataInput, *, seed: int, drop_last: bool | None) -> list[float]:
    """The seconds of the steps of one round, without the first ones, which allocate and agree on orders."""
    feed = Feed(source, plan, batch_size=task.batch_size, seed=seed, drop_last=drop_last)
    step = parallelize(task.model, task.loss, task.optimizer, plan, clip=task.clip, seed=seed, tensor=task.tensor)
    batches: Any = feed.repeat()
    with closing(batches):
        seconds = [step(next(batches)).seconds for _ in range(WARM_UP + STEPS)]
    return seconds[WARM_UP:]
