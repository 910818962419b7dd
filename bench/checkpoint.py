"""Checkpoints: saving and loading, compared with torch.distributed.checkpoint and with the disk itself.

    python -m bench.checkpoint [--width 384] [--layers 8] [--rounds 9]
    torchrun --nproc-per-node 2 -m bench.checkpoint …     the same on two ranks, each with a thread

disk    the same bytes in one file: written under a new name and fsynced; read through one small buffer, as dd does
cold    read after the page cache has been dropped; warm: read again right after that
Law: rounds are interleaved, one of each kind after the other; ratios are taken within a round, and medians printed. All
     kinds keep as many old files as a run does: blocks that a virtual disk has never held are slow to write.
"""

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bench.measurement import describe_machine, format_table
from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.store import Retention
from fourfold.environment.world import from_environment
from fourfold.feed.feed import Feed
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm

BATCH_SIZE, LENGTH = 4, 32
MIB = 2**20
CHUNK_BYTES = 4 * MIB
WARM_UP = 3  # rounds


class NullLog:
    """A log that writes nothing."""

    def write_record(self, record: Mapping[str, Any]) -> None: ...
    def log_message(self, text: str) -> None:
        raise RuntimeError(text)

    def log_bytes(self) -> int:
        return 0

    def truncate_log(self, num_bytes: int) -> None: ...
    def sync(self) -> None: ...


def make_training_state(width: int, layers: int) -> TrainingState:
    """A language model after one step, so that the optimizer has its state."""
    task = lm.task(width=width, layers=layers, length=LENGTH)
    plan = Plan(dp=dist.get_world_size() if dist.is_initialized() else 1)
    step = parallelize(task.model(), task.loss, task.optimizer, plan)
    tokens = torch.randint(0, 256, (BATCH_SIZE, LENGTH))
    positions = torch.arange(LENGTH).expand(BATCH_SIZE, LENGTH)
    step(({"tokens": tokens, "positions": positions}, tokens))
    return TrainingState(step, Feed([(tokens, tokens)] * plan.dp, plan, batch_size=plan.dp))


def drop_page_cache(folder: Path) -> None:
    """Tell the kernel to drop the files from its page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[file.write(remaining) :]
        os.fsync(file.fileno())


def read_file(path: Path) -> None:
    # Not read_bytes: page faults of a new buffer are not the disk's work, and would flatter the others.
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def remove_files(folder: Path, number: int) -> None:
    """Remove what an earlier round has written."""
    shutil.rmtree(folder / f"dcp-{number}", ignore_errors=True)
    (folder / f"plain-{number}").unlink(missing_ok=True)


def flat_state(step: TrainStep) -> dict[str, Any]:
    """The same tensors, as torch.distributed.checkpoint takes them."""
    state = step.state_dict()
    tensors = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"].items():
        tensors |= {f"optimizer.{name}.{key}": v for key, v in values.items() if isinstance(v, torch.Tensor)}
    return tensors


class Timings:
    """Seconds by kind, as rank 0 measures them: from when all ranks are ready until all have finished."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self.seconds: dict[str, list[float]] = {}

    def record(self, kind: str, *parts: Callable[[], object], alone: bool = False) -> None:
        """Time the parts, one after the other. `alone`: only rank 0 runs them."""
        self._step.all_gather_json(None)
        begin = time.perf_counter()
        for part in parts if self._step.rank == 0 or not alone else ():
            part()
        self._step.all_gather_json(None)
        self.seconds.setdefault(kind, []).append(time.perf_counter() - begin)


def measure(run: TrainingState, *, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds by kind, and the number of bytes."""
    manager = CheckpointManager(run, AttemptDir(folder / "run", "bench"), NullLog(), seed=0)
    manager.save(TrainingProgress(1))  # allocates the snapshot
    manager.wait()
    assert manager._snapshot is not None
    num_bytes = sum(run.step.all_gather_json(manager._snapshot.num_bytes))
    data = os.urandom(num_bytes)
    torch_state = flat_state(run.step)
    alone = not dist.is_initialized()
    timing = Timings(run.step)
    for number in range(-WARM_UP, rounds):
        if number == 0:
            timing.seconds.clear()
        plain, target = (folder / f"{kind}-{number}" for kind in ("plain", "dcp"))
        if run.step.rank == 0:
            remove_files(folder, number - Retention().num_newest)
        timing.record("disk: write", lambda at=plain: write_file(at, data), alone=True)
        timing.record(
            "fourfold: save", lambda at=number: manager.save(TrainingProgress(WARM_UP + at + 2)), manager.wait
        )
        timing.record("torch DCP: save", lambda at=target: save(torch_state, checkpoint_id=str(at), no_dist=alone))
        timing.record("", lambda: drop_page_cache(folder), alone=True)
        for kind in ("cold", "warm"):
            read = functools.partial(load, torch_state, checkpoint_id=str(target), no_dist=alone)
            timing.record(f"disk: read, {kind}", functools.partial(read_file, plain), alone=True)
            timing.record(f"fourfold: load, {kind}", manager.resume)
            timing.record(f"torch DCP: load, {kind}", read)
    del timing.seconds[""]
    return {**timing.seconds, "bytes": [float(num_bytes)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    # As each of two ranks has on two cores: with more threads than free cores a plain copy takes ten times as long.
    torch.set_num_threads(1)
    if from_environment() is not None:
        dist.init_process_group("gloo")
    run = make_training_state(arguments.width, arguments.layers)
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-", dir=".") as local_folder:
        folder = Path(run.step.all_gather_json(local_folder)[0])
        seconds_by_kind = measure(run, rounds=arguments.rounds, folder=folder)
        run.step.all_gather_json(None)
    if run.step.rank == 0:
        print_results(seconds_by_kind, ranks=run.step.plan.dp, rounds=arguments.rounds)
    if dist.is_initialized():
        dist.destroy_process_group()


def print_results(seconds_by_kind: dict[str, list[float]], *, ranks: int, rounds: int) -> None:
    (num_bytes,) = seconds_by_kind.pop("bytes")
    ranks_text = f"{ranks} {'rank' if ranks == 1 else 'ranks'} with one thread each"
    print(f"{describe_machine()}\n{num_bytes / MIB:.0f} MiB, {ranks_text}, medians of {rounds} interleaved rounds\n")
    rows = [("", "seconds", "MiB/s", "of the disk", "middle half")]
    for kind, seconds in seconds_by_kind.items():
        median = statistics.median(seconds)
        disk = seconds_by_kind[
            "disk: write" if kind.endswith(("save", "write")) else f"disk: read, {kind.rpartition(' ')[2]}"
        ]
        shares = [one / each for one, each in zip(disk, seconds, strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        shown = f"{middle:.0%}", f"{low:.0%}–{high:.0%}"
        rows.append((kind, f"{median:.3f}", f"{num_bytes / MIB / median:,.0f}", *shown))
    print(format_table(rows))


if __name__ == "__main__":
    main()
