"""Fourfold: distributed training for PyTorch. A task is written for one device; a plan says how to run it on many.

The names below are the whole public interface. They are loaded on first use: `import fourfold` does not import torch.
"""

import importlib

from fourfold.words.version import VERSION

TYPE_CHECKING = False  # `typing` takes most of this import's time, in which a command cannot answer signals yet
if TYPE_CHECKING:
    from typing import Any

    from fourfold import callbacks, losses, optim
    from fourfold.attention import DocumentMask
    from fourfold.checkpoint.checkpoints import Checkpoints
    from fourfold.comm.init import world
    from fourfold.feed.dataloader import shard
    from fourfold.feed.feed import Feed
    from fourfold.feed.formats.open import open_source
    from fourfold.feed.mixed import Mixed, Weighted
    from fourfold.feed.pack.reader import Pack
    from fourfold.feed.pack.writer import pack
    from fourfold.feed.rows.mongo import mongo
    from fourfold.feed.rows.sql import sql
    from fourfold.feed.token_rows import TokenRows
    from fourfold.feed.transform import Transformed
    from fourfold.launcher.notebook import launch, verify
    from fourfold.plan.ask import Ask
    from fourfold.plan.lr_schedule import LRSchedule
    from fourfold.plan.plan import Plan
    from fourfold.step.distributed_optimizer import DistributedOptimizer
    from fourfold.step.parallelize import parallelize
    from fourfold.step.step_runner import Metrics
    from fourfold.step.train_step import TrainStep
    from fourfold.trainer.train import train
    from fourfold.words.callback import Callback
    from fourfold.words.errors import DamagedSample, FourfoldError, PlanError
    from fourfold.words.task import Data, Task

__version__ = VERSION
__all__ = [
    "Ask",
    "Callback",
    "Checkpoints",
    "DamagedSample",
    "Data",
    "DistributedOptimizer",
    "DocumentMask",
    "Feed",
    "FourfoldError",
    "LRSchedule",
    "Metrics",
    "Mixed",
    "Pack",
    "Plan",
    "PlanError",
    "Task",
    "TokenRows",
    "TrainStep",
    "Transformed",
    "Weighted",
    "callbacks",
    "launch",
    "losses",
    "mongo",
    "open_source",
    "optim",
    "pack",
    "parallelize",
    "shard",
    "sql",
    "train",
    "verify",
    "world",
]

_MODULE_OF = {
    "Ask": "plan.ask",
    "Callback": "words.callback",
    "Checkpoints": "checkpoint.checkpoints",
    "DamagedSample": "words.errors",
    "Data": "words.task",
    "DistributedOptimizer": "step.distributed_optimizer",
    "DocumentMask": "attention",
    "Feed": "feed.feed",
    "FourfoldError": "words.errors",
    "Metrics": "step.step_runner",
    "Mixed": "feed.mixed",
    "Pack": "feed.pack.reader",
    "Plan": "plan.plan",
    "PlanError": "words.errors",
    "LRSchedule": "plan.lr_schedule",
    "Task": "words.task",
    "TokenRows": "feed.token_rows",
    "TrainStep": "step.train_step",
    "Transformed": "feed.transform",
    "Weighted": "feed.mixed",
    "launch": "launcher.notebook",
    "mongo": "feed.rows.mongo",
    "open_source": "feed.formats.open",
    "pack": "feed.pack.writer",
    "parallelize": "step.parallelize",
    "shard": "feed.dataloader",
    "sql": "feed.rows.sql",
    "train": "trainer.train",
    "verify": "launcher.notebook",
    "world": "comm.init",
}


def __getattr__(name: str) -> "Any":
    if name in ("callbacks", "losses", "optim"):
        return importlib.import_module(f"fourfold.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fourfold' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fourfold.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
