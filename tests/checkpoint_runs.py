"""A run on one thread's rank that saves and resumes, and its log in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from fourfold.checkpoint.collect import TrainingState, collect_state
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.store import CheckpointStore
from fourfold.feed.feed import Feed
from fourfold.optim.ema import EMA
from fourfold.testing import threads
from tests.cases import Case, batches, build_step, local_batch


class MemoryLog:
    """A log in memory."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.messages: list[str] = []

    def write_record(self, record: Any) -> None:
        self.records.append(record)

    def log_message(self, text: str) -> None:
        self.messages.append(text)

    def log_bytes(self) -> int:
        return len(self.records)

    def truncate_log(self, num_bytes: int) -> None:
        del self.records[num_bytes:]

    def sync(self) -> None: ...


class ThreadRun:
    """A run of a case on one thread's rank; `save_at` are steps, `valid` the losses measured there."""

    def __init__(self, case: Case, comm: Any, folder: Path, *, token: str = "a", ema: float | None = None) -> None:
        self.case, self.step = case, build_step(case, comm.size, comm)
        source = [(torch.zeros(1), torch.zeros(1)) for _ in range(40)]
        self.ema = EMA(self.step.weight_shards, ema) if ema else None
        self.feed = Feed(source, batch_size=8)
        self.log = MemoryLog()
        trained = TrainingState(self.step, self.feed, self.ema)
        self.checkpoints = CheckpointManager(trained, AttemptDir(folder, token), self.log, seed=0)

    def run_steps(self, start: int, stop: int, *, save_at: Any = (), valid: dict[int, float] | None = None) -> None:
        for number in range(start, stop):
            self.step(local_batch(batches(self.case)[number], self.step.plan.dp, self.step.dp_index))
            if self.ema is not None and self.step.is_synchronized:
                self.step.flush()
                self.ema.update(number + 1)
            if number + 1 in save_at:
                loss = (valid or {}).get(number + 1)
                self.checkpoints.save(TrainingProgress(number + 1, [1.0], {} if loss is None else {"loss": loss}))
        self.checkpoints.wait()

    def copy_tensors(self) -> dict[str, Tensor]:
        """Copies of everything that this rank holds, by label."""
        found = collect_state(TrainingState(self.step, self.feed, self.ema))
        return {
            each.held.tensor.label: torch.cat([part.detach().clone() for part in each.segments])
            for each in found.live_tensors
        }


def save_twice(folder: Path, size: int = 2) -> CheckpointStore:
    threads.run(size, lambda comm: ThreadRun(Case(), comm, folder).run_steps(0, 3, save_at=(1, 3)))
    store = CheckpointStore(folder)
    assert store.steps() == [1, 3]
    return store


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest of a checkpoint, and update its checksum."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())["manifest"]
    change(manifest)
    body = json.dumps(manifest).encode()
    path.write_bytes(b'{"xxh3_128":"%s","manifest":%s}' % (xxhash.xxh3_128_hexdigest(body).encode(), body))
