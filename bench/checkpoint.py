"""Checkpoints: saving and loading beside torch.distributed.checkpoint and beside the disk itself.

    python -m bench.checkpoint [--width 384] [--layers 8] [--rounds 9]
    torchrun --nproc-per-node 2 -m bench.checkpoint …     the same on two ranks, each with a thread

disk    the same bytes in one file: written to a new name and fsynced; read through one small buffer, as dd does
cold    after the system has been asked to forget the files; warm: right after that
Law: rounds are interleaved, one of each kind after the other; a share is taken within its round, and medians are told.
     Everyone keeps as many old files as a run does: blocks that a virtual disk has never held are slow to write.
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
from fourfold.checkpoint.manager import NUM_KEPT, AttemptDir, CheckpointManager, TrainingProgress
from fourfold.environment.world import from_environment
from fourfold.feed.feed import Feed
from fourfold.plan.plan import Plan
from fourfold.step.build import TrainStep, parallelize
from fourfold.tasks import lm

BATCH_SIZE, LENGTH = 4, 32
MIB = 2**20
CHUNK_BYTES = 4 * MIB
WARM_UP = 3  # rounds


class NullLog:
    """A log that nobody reads."""

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
    """Ask the system to drop what it holds of the files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def read_file(path: Path) -> None:
    # Not read_bytes: faulting in the pages of a new buffer is no work of the disk, and would flatter the others.
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def remove_files(folder: Path, number: int) -> None:
    """What was written in an earlier round."""
    shutil.rmtree(folder / f"dcp-{number}", ignore_errors=True)
    (folder / f"plain-{number}").unlink(missing_ok=True)


def flat_state(step: TrainStep) -> dict[str, Any]:
    """The same tensors as torch.distributed.checkpoint is given them."""
    state = step.state_dict()
    tensors = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"].items():
        tensors |= {f"optimizer.{name}.{key}": v for key, v in values.items() if isinstance(v, torch.Tensor)}
    return tensors


class Timings:
    """Seconds by kind, as rank 0 sees them: from when all ranks are there until all have done their part."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self.seconds: dict[str, list[float]] = {}

    def record(self, kind: str, *parts: Callable[[], object], alone: bool = False) -> None:
        """Time the parts, one after the other. `alone`: rank 0 does it, for all."""
        self._step.all_gather_json(None)
        begin = time.perf_counter()
        for part in parts if self._step.rank == 0 or not alone else ():
            part()
        self._step.all_gather_json(None)
        self.seconds.setdefault(kind, []).append(time.perf_counter() - begin)


def measure(run: TrainingState, *, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds by kind, and the number of bytes."""
    keeper = CheckpointManager(run, AttemptDir(folder / "run", "bench"), NullLog(), seed=0)
    keeper.save(TrainingProgress(1))  # allocates the snapshot
    keeper.wait()
    num_bytes = sum(run.step.all_gather_json(keeper._snapshot.num_bytes))
    data = os.urandom(num_bytes)
    theirs = flat_state(run.step)
    alone = not dist.is_initialized()
    timing = Timings(run.step)
    for number in range(-WARM_UP, rounds):
        if number == 0:
            timing.seconds.clear()
        plain, target = (folder / f"{kind}-{number}" for kind in ("plain", "dcp"))
        if run.step.rank == 0:
            remove_files(folder, number - NUM_KEPT)
        timing.record("disk: write", lambda at=plain: write_file(at, data), alone=True)
        timing.record("fourfold: save", lambda at=number: keeper.save(TrainingProgress(WARM_UP + at + 2)), keeper.wait)
        timing.record("torch DCP: save", lambda at=target: save(theirs, checkpoint_id=str(at), no_dist=alone))
        timing.record("", lambda: drop_page_cache(folder), alone=True)
        for kind in ("cold", "warm"):
            read = functools.partial(load, theirs, checkpoint_id=str(target), no_dist=alone)
            timing.record(f"disk: read, {kind}", functools.partial(read_file, plain), alone=True)
            timing.record(f"fourfold: load, {kind}", keeper.resume)
            timing.record(f"torch DCP: load, {kind}", read)
    del timing.seconds[""]
    return {**timing.seconds, "bytes": [float(num_bytes)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    # As a rank of two has on two cores; with more threads than free cores a plain copy takes ten times as long.
    torch.set_num_threads(1)
    if from_environment() is not None:
        dist.init_process_group("gloo")
    run = make_training_state(arguments.width, arguments.layers)
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-", dir=".") as own:
        folder = Path(run.step.all_gather_json(own)[0])
        found = measure(run, rounds=arguments.rounds, folder=folder)
        run.step.all_gather_json(None)
    if run.step.rank == 0:
        print_results(found, ranks=run.step.plan.dp, rounds=arguments.rounds)
    if dist.is_initialized():
        dist.destroy_process_group()


def print_results(found: dict[str, list[float]], *, ranks: int, rounds: int) -> None:
    (num_bytes,) = found.pop("bytes")
    many = f"{ranks} {'rank' if ranks == 1 else 'ranks'} with one thread each"
    print(f"{describe_machine()}\n{num_bytes / MIB:.0f} MiB, {many}, medians of {rounds} interleaved rounds\n")
    rows = [("", "seconds", "MiB/s", "of the disk", "middle half")]
    for kind, seconds in found.items():
        median = statistics.median(seconds)
        disk = found["disk: write" if kind.endswith(("save", "write")) else f"disk: read, {kind.rpartition(' ')[2]}"]
        shares = [one / each for one, each in zip(disk, seconds, strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        shown = f"{middle:.0%}", f"{low:.0%}–{high:.0%}"
        rows.append((kind, f"{median:.3f}", f"{num_bytes / MIB / median:,.0f}", *shown))
    print(format_table(rows))


if __name__ == "__main__":
    main()
