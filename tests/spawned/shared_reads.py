"""What the ranks of a world do for `test_shared_reads.py`. Results are JSON."""

import contextlib
import dataclasses
import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fourfold as ff
from fourfold.feed import evaluation_batches, feed
from fourfold.feed.sharing.shared_reads import OWN_READS
from fourfold.tasks import lm


class Counted:
    """A source that counts the samples that it has read."""

    def __init__(self, source: Any) -> None:
        self.source, self.bytes_read = source, 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        self.bytes_read += 1
        return self.source[index]


def reads(folder: str, shared: bool, **fields: Any) -> list[Any]:
    """What this rank reads for the training and the validation of a run, and the losses."""
    sharing = [fields.get(axis, 1) for axis in ("cp", "tp", "pp")]
    plan = ff.Plan(dp=dist.get_world_size() // math.prod(sharing), **fields)
    task = lm.task(width=32, layers=2, heads=4, kv_heads=4, length=32, valid_bytes=2048)
    data = task.data()
    train, valid = Counted(data.train), Counted(data.valid)
    task = dataclasses.replace(task, data=lambda: ff.Data(train=train, valid=valid))
    modules = () if shared else (feed, evaluation_batches)
    with contextlib.ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "open_shared_reads", return_value=OWN_READS))
        name = f"{fields}-{shared}"
        run = ff.train(task, plan, steps=6, batch_size=8, folder=folder, name=name, quiet=True, checkpoint_every=0)
    return [train.bytes_read, valid.bytes_read, run.loss, run.valid["loss"]]


def own_loop(shared: bool, **fields: Any) -> list[Any]:
    """The targets of an epoch of `ff.Feed`, in a loop without a step, and what this rank has read for it."""
    source = Counted([(torch.full((50,), float(number)), number) for number in range(40)])
    plan = ff.Plan(**fields)
    batches = [batch[1].tolist() for batch in ff.Feed(source, plan, batch_size=8, seed=3, shared=shared)]
    return [batches, source.bytes_read]
