"""Workers: processes of a torch DataLoader that read batches ahead, in the feed's order.

request  the samples of one local batch: (seed, epoch, numbers)
Law: a batch that a worker reads is the one that the feed would read itself, random numbers included. So workers change
neither the batches nor where a run resumes, nor whether a run that is asked to stop can finish its step.
"""

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fourfold.environment.known_waits import HandedSlot
from fourfold.environment.processes import leave_signals_to_parent, process_state
from fourfold.feed.readable import Fetched, fetch_readable
from fourfold.feed.sample_rng import seed_generators
from fourfold.feed.transform import in_epoch
from fourfold.torch_kit.torch_private import ExceptionWrapper, worker_processes
from fourfold.words.error_notes import noting, outer_traceback
from fourfold.words.errors import FourfoldError, Problem, WorkerDiedError
from fourfold.words.task import Source

EXIT_SECONDS = 5.0  # how long a worker whose connection is closed may take to end
POLL_SECONDS = 0.01

_END = object()


class Request(NamedTuple):
    """The samples of one local batch."""

    seed: int
    epoch: int
    numbers: Sequence[int]


class _Refused(NamedTuple):
    """An error for people, as a value: torch would put a traceback of the worker into its text."""

    error: FourfoldError


class _Reader(Dataset[Any]):
    """In a worker: `reader[request]` is the batch. Samples are always seeded: nothing else draws in a worker."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, request: Request) -> Any:
        try:
            seeded = functools.partial(seed_generators, request.seed, request.epoch)
            source = in_epoch(self._source, request.seed, request.epoch)
            return fetch_readable(source, request.numbers, before_sample=seeded)
        except Exception as error:
            return refused(error)


class _Requests:
    """What a DataLoader iterates over in place of a sampler; the loader and its workers may last for many epochs."""

    def __init__(self) -> None:
        self.upcoming: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.upcoming)


class WorkerPool:
    """The workers of a user's DataLoader, and its `pin_memory`, for a source of numbered samples."""

    def __init__(self, loader: DataLoader[Any], source: Source) -> None:
        self._requests = _Requests()
        self._loader = copy_loader(loader, _Reader(source), sampler=self._requests)

    def read(self, requests: Iterable[Request]) -> Iterator[Fetched]:
        """The batches of some requests, in their order; requests are taken ahead of the batches."""
        self._requests.upcoming = requests
        yield from raise_refused(self._loader)


def copy_loader(loader: DataLoader[Any], dataset: Any, **options: Any) -> DataLoader[Any]:
    """A loader with the workers of another one, whose dataset makes whole batches."""
    if not isinstance(dataset, IterableDataset):
        options["persistent_workers"] = loader.persistent_workers
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_identity,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(_begin_worker, HandedSlot(), loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        # Not torch's default generator: training draws from it, and must draw the same with and without workers.
        generator=torch.Generator().manual_seed(0),
        **options,
    )


_workers = weakref.WeakSet[Any]()


def _begin_worker(slot: HandedSlot, begin: Callable[[int], None] | None, number: int) -> None:
    slot.take()
    parent = multiprocessing.parent_process()
    leave_signals_to_parent()
    if sys.platform == "linux" and parent is not None and process_state(parent.pid or 0) in ("", "Z"):
        os._exit(1)  # it ended before the line above, and torch would wait for it for ever
    if begin is not None:
        begin(number)


@atexit.register
def _kill_workers() -> None:
    """End workers that still read: `multiprocessing` would send them SIGTERM and wait for their end."""
    for process in multiprocessing.active_children():
        if process in _workers:
            process.kill()


def raise_refused(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader's workers. Raises the first error for people among them."""
    get_temp_dir()  # the folder of the workers' sockets: this process removes it, as a worker that is killed does not
    batches = iter(loader)
    own = worker_processes(batches)
    _workers.update(own)
    while True:
        with noting("in a worker of the DataLoader"):  # whose lines are in the message
            try:
                batch = next(batches, _END)
            except (RuntimeError, ConnectionError, EOFError) as error:  # torch's own, or of a connection to a worker
                _wait_for_exit([] if isinstance(error, RuntimeError) else own)
                if (dead := _dead_worker_error(own)) is not None:
                    raise dead from None
                raise
        if batch is _END:
            return
        if isinstance(batch, _Refused):
            raise batch.error
        yield batch


def _wait_for_exit(workers: Sequence[Any]) -> None:
    """Wait until one of them has ended: its connections are closed a moment earlier."""
    deadline = time.monotonic() + EXIT_SECONDS
    while not any(process.exitcode for process in workers) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _dead_worker_error(workers: Sequence[Any]) -> WorkerDiedError | None:
    """Why a worker is not there any more; None: all are, or have ended as they should."""
    code = next((process.exitcode for process in workers if process.exitcode), None)
    if code is None:
        return None
    got = f"a worker of the DataLoader that ended with exit code {code}"
    attempt = "the data without workers (num_workers=0), which shows the error"
    if code < 0:
        got = f"a worker of the DataLoader that was killed by {signal.Signals(-code).name}"
        attempt = "fewer workers or a smaller prefetch_factor, if the kernel killed it for want of memory (see dmesg)"
    error = WorkerDiedError(Problem(got, "workers that live as long as training", attempt), where="the data")
    error.signal = -code if code < 0 else None
    return error


def refused(error: Exception) -> Any:
    """An error as a worker sends it; `raise_refused` raises it. Of others than those for people, torch raises a copy,
    whose message has the traceback: here without frames of ours."""
    if isinstance(error, FourfoldError):
        return _Refused(error)
    info = get_worker_info()
    where = f"in DataLoader worker process {info.id if info else 0}"
    return ExceptionWrapper((type(error), error, outer_traceback(error)), where)


def _identity(batch: Any) -> Any:
    return batch
