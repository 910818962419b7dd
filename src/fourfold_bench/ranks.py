"""Ranks: the emulated accelerators as processes, which train together on one data set.

compute  an accelerator sleeps until its computing time is over; its batch is in host memory, not copied to a device
barrier  after each step, as DLIO has it: all accelerators wait for the last, so a late batch is charged to all

Processes, not threads: each accelerator of a real training has an interpreter of its own, and the readers of several
would share one lock. They are forked, so that they need not import torch again, and use it with one thread each.

Law: a step is asked for when the one before has ended, so that waits, computing and barriers tile the running time. An
error of one rank ends all of them, and is raised here; no rank outlives its parent's call.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fourfold.feed.batches import Batch
from fourfold.feed.feed import Feed
from fourfold.feed.position import Position
from fourfold.feed.staging.shard_cache import Shard
from fourfold.trace.utilization import TimedStep
from fourfold.words.errors import DataError, FourfoldError, Problem
from fourfold_bench.disk import cached_fraction, drop_from_page_cache
from fourfold_bench.source import DataShape, FileSource, Reads
from fourfold_bench.staged_files import SharedTime, StagedFiles, ThrottledOrigin, ThrottledSource, TokenBucket
from fourfold_bench.workload import Seconds

# ---- one accelerator -------------------------------------------------------------------------------------------------


Barrier = Callable[[], object]


class Clock(Protocol):
    """What time it is, in seconds."""

    def now(self) -> float: ...

    def sleep_until(self, deadline: float) -> None: ...


class SystemClock:
    """The clock of this host, the same in all of its processes."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, deadline: float) -> None:
        time.sleep(max(0.0, deadline - time.monotonic()))


class Accelerator(NamedTuple):
    """An emulated accelerator: one of `size` that train together.

    feed     yields its part of each global batch
    compute  how long it computes in a step; drawn by `rng`
    steps    of an epoch, at most; None: all
    """

    feed: Feed
    compute: Seconds
    rng: np.random.Generator
    barrier: Barrier
    clock: Clock = SystemClock()
    steps: int | None = None

    def epoch(self, number: int) -> list[TimedStep]:
        """Do an epoch, the first is 0. The barrier is called once before it and after each step."""
        seed = self.feed.state.seed
        self.feed.load_state(Position(seed, number, 0, self.feed.num_samples))
        self.barrier()
        batches = iter(self.feed)
        try:
            return list(self._steps(batches))
        finally:
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator: its thread ends here

    def _steps(self, batches: Iterator[Batch]) -> Iterator[TimedStep]:
        done, asked = 0, self.clock.now()
        while done != self.steps and (batch := next(batches, None)) is not None:
            ready = self.clock.now()
            seconds = self.compute.draw(self.rng)
            self.clock.sleep_until(ready + seconds)
            self.barrier()
            ended = self.clock.now()
            yield TimedStep(asked, ready, ended, seconds, len(batch[1]), batch.bytes_read)
            done, asked = done + 1, ended


# ---- all of them -----------------------------------------------------------------------------------------------------


FORK = multiprocessing.get_context("fork")
JOIN_SECONDS = 5.0
STAGED_SUFFIX = "-staged"  # of the folder of copies


class Training(NamedTuple):
    """An emulated training.

    size         accelerators
    batch_size   samples of each of them
    steps        of an epoch
    drops_cache  whether the files are dropped from the page cache before each epoch
    origin       bytes a second that the storage delivers; None: as fast as it can
    shards       the files with their digests, if they are staged: copied to a folder of their own
    """

    shape: DataShape
    folder: Path
    reads: Reads
    compute: Seconds
    size: int
    batch_size: int
    epochs: int
    steps: int
    drops_cache: bool = False
    origin: float | None = None
    seed: int = 0
    shards: Sequence[Shard] = ()


class EpochSteps(NamedTuple):
    """One rank's steps of one epoch. `cached`: the part of the data that was in the page cache before; of rank 0."""

    steps: list[TimedStep]
    cached: float | None = None


def open_source(training: Training, free_at: SharedTime) -> Any:
    """The data of one accelerator: from the files, from a slow origin, or from copies of its files."""
    bucket = None if training.origin is None else TokenBucket(training.origin, free_at)
    if training.shards:
        origin = ThrottledOrigin(training.shape, training.folder, bucket)
        return StagedFiles(origin, training.shards, _copies_folder(training), (training.shape, training.reads))
    source = FileSource(training.shape, training.folder, training.reads)
    return source if bucket is None else ThrottledSource(source, bucket)


def _copies_folder(training: Training) -> Path:
    return training.folder.with_name(f"{training.folder.name}{STAGED_SUFFIX}")


@contextlib.contextmanager
def no_copies(training: Training) -> Iterator[None]:
    """Within: a training whose copies are made in it, and removed after it."""
    folder = _copies_folder(training)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train_rank(training: Training, index: int, barrier: Barrier, free_at: SharedTime) -> list[EpochSteps]:
    """What one accelerator does, epoch by epoch."""
    source = open_source(training, free_at)
    options = {"batch_size": training.batch_size * training.size, "seed": training.seed, "drop_last": True}
    feed = Feed.of_data_rank(source, size=training.size, index=index, **options)
    rng = np.random.default_rng((training.seed, index))
    accelerator = Accelerator(feed, training.compute, rng, barrier, steps=training.steps)
    paths, epochs = training.shape.paths(training.folder), []
    for number in range(training.epochs):
        cached = None
        if index == 0:  # the others wait at the barrier that begins the epoch
            if training.drops_cache:
                drop_from_page_cache(paths)
            cached = cached_fraction(paths)
        epochs.append(EpochSteps(accelerator.epoch(number), cached))
    return epochs


def run_ranks(training: Training) -> list[list[EpochSteps]]:
    """The epochs of every rank. Raises the first error of a rank."""
    barrier, free_at = FORK.Barrier(training.size), FORK.Value("d", 0.0)
    pipes = [FORK.Pipe(duplex=False) for _ in range(training.size)]
    ranks = [
        FORK.Process(target=_run_rank, args=(training, index, barrier, free_at, [pipe[1] for pipe in pipes]))
        for index in range(training.size)
    ]
    try:
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        return _receive_all([receiver for receiver, _ in pipes])
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.terminate()
                rank.join(JOIN_SECONDS)


def _run_rank(
    training: Training, index: int, barrier: Any, free_at: SharedTime, senders: Sequence[Connection[Any, Any]]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks
    for other in (*senders[:index], *senders[index + 1 :]):
        other.close()  # so that the pipe of a rank ends with it
    torch.set_num_threads(1)
    try:
        answer: dict[str, Any] = {"epochs": train_rank(training, index, barrier.wait, free_at)}
    except threading.BrokenBarrierError:
        answer = {}  # another rank has failed, and says why
    except FourfoldError as error:
        answer = {"problems": error.problems, "where": error.where}
    except BaseException:
        answer = {"problems": [(f"accelerator {index} failed\n{traceback.format_exc()}",)], "where": ""}
    senders[index].send_bytes(json.dumps(answer).encode())
    senders[index].close()
    if "epochs" not in answer:
        barrier.abort()


def _receive_all(receivers: Sequence[Connection[Any, Any]]) -> list[list[EpochSteps]]:
    """What every rank has sent. Raises the error of the first that sends one, or ends without a word."""
    found: dict[int, Any] = {}
    while len(found) < len(receivers):
        for receiver in wait([each for each in receivers if not each.closed]):
            index = receivers.index(receiver)  # type: ignore[arg-type]
            found[index] = _receive(receivers[index], index)
            receivers[index].close()
    return [
        [EpochSteps([TimedStep(*step) for step in steps], cached) for steps, cached in found[index]["epochs"]]
        for index in range(len(receivers))
    ]


def _receive(receiver: Connection[Any, Any], index: int) -> dict[str, Any]:
    try:
        answer = json.loads(receiver.recv_bytes())
    except EOFError:
        problem = Problem(f"accelerator {index} died", "memory for all accelerators", "fewer accelerators")
        raise DataError(problem, where="fourfold feed bench") from None
    if "problems" in answer:
        raise DataError([Problem(*problem) for problem in answer["problems"]], where=answer["where"])
    return answer
