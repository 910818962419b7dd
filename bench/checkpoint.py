"""Checkpoints: saving and loading beside torch.distributed.checkpoint and beside the disk itself.

    python -m bench.checkpoint [--width 384] [--layers 8] [--rounds 5]

disk    the same bytes in one file: written and fsynced, read after the system has been asked to forget them
pause   what the training loop waits for; the rest of a save happens beside it
Law: rounds are interleaved, one of each kind after the other, and medians are told.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bench.measure import machine, table
from fourfold.feed.feed import Feed
from fourfold.run.build import TrainStep, parallelize
from fourfold.run.checkpoint import shelf
from fourfold.run.checkpoint.keeper import Keeper, Place, Progress
from fourfold.run.checkpoint.state import Trained
from fourfold.tasks import lm

BATCH_SIZE, LENGTH = 4, 32
MIB = 2**20


class Silent:
    """A log that nobody reads."""

    def line(self, record: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None:
        raise RuntimeError(text)

    def position(self) -> int:
        return 0

    def cut(self, position: int) -> None: ...
    def sync(self) -> None: ...


def trained(width: int, layers: int) -> Trained:
    """A language model after one step, so that the optimizer has its state."""
    task = lm.task(width=width, layers=layers, length=LENGTH)
    step = parallelize(task.model(), task.loss, task.optimizer)
    tokens = torch.randint(0, 256, (BATCH_SIZE, LENGTH))
    positions = torch.arange(LENGTH).expand(BATCH_SIZE, LENGTH)
    step(({"tokens": tokens, "positions": positions}, tokens))
    return Trained(step, Feed([(tokens, tokens)], batch_size=1))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def forget(folder: Path) -> None:
    """Ask the system to drop what it holds of the files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def flat_state(step: TrainStep) -> dict[str, Any]:
    """The same tensors as torch.distributed.checkpoint is given them."""
    state = step.state_dict()
    tensors = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"].items():
        tensors |= {f"optimizer.{name}.{key}": v for key, v in values.items() if isinstance(v, torch.Tensor)}
    return tensors


def measure(run: Trained, *, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds by kind."""
    keeper = Keeper(run, Place(folder / "run", "bench"), Silent(), seed=0)
    keeper.save(Progress(1))  # allocates the snapshot
    keeper.wait()
    data = os.urandom(keeper._snapshot.num_bytes)
    theirs = flat_state(run.step)
    found: dict[str, list[float]] = {}

    def note(kind: str, seconds: float) -> None:
        found.setdefault(kind, []).append(seconds)

    for number in range(rounds):
        note("disk: write", timed(lambda: write_file(folder / "plain", data)))
        begin = time.perf_counter()
        keeper.save(Progress(number + 2))
        note("fourfold: pause", time.perf_counter() - begin)
        keeper.wait()
        note("fourfold: save", time.perf_counter() - begin)
        target = folder / f"dcp-{number}"
        note("torch DCP: save", timed(lambda at=target: save(theirs, checkpoint_id=str(at), no_dist=True)))
        forget(folder)
        note("disk: read", timed((folder / "plain").read_bytes))
        note("fourfold: load", timed(keeper.resume))
        note("fourfold: verify", timed(lambda: shelf.verify(shelf.newest_good(folder / "run"))))
        note("torch DCP: load", timed(lambda at=target: load(theirs, checkpoint_id=str(at), no_dist=True)))
    found["bytes"] = [float(len(data))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    # As a rank of two has on two cores; with more threads than free cores a plain copy takes ten times as long.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-", dir=".") as folder:
        run = trained(arguments.width, arguments.layers)
        found = measure(run, rounds=arguments.rounds, folder=Path(folder))
    (num_bytes,) = found.pop("bytes")
    print(f"{machine()}\n{num_bytes / MIB:.0f} MiB, one rank, medians of {arguments.rounds} interleaved rounds\n")
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    rows = [("", "seconds", "MiB/s", "of the disk")]
    for kind, seconds in medians.items():
        disk = medians["disk: write" if "save" in kind or "write" in kind else "disk: read"]
        share = "" if "pause" in kind else f"{disk / seconds:.0%}"
        rows.append((kind, f"{seconds:.3f}", f"{num_bytes / MIB / seconds:,.0f}", share))
    print(table(rows))


if __name__ == "__main__":
    main()
