"""Data input: the kinds of data that a user may give, as a source or a stream that a feed reads.

    a sequence, a torch Dataset, a Dataset of `datasets`      a source: a length and numbered samples
    a DataLoader over one of them                             the same, with its workers and collate function
    an IterableDataset, of torch or `datasets`; a DataLoader over one   a stream

Law: what a DataLoader says is kept, or refused, or named in `notes`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from fourfold.feed.source import CollatedSource, source_attribute
from fourfold.feed.stream import Stream
from fourfold.feed.workers import WorkerPool
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem
from fourfold.words.task import Data, Source

INDEXABLE_NEED = "numbered samples, len(source) and source[i]; or a DataLoader or IterableDataset"


@dataclasses.dataclass(frozen=True)
class DataInput:
    """Data as a feed reads it.

    workers      read the batches of a source, if a DataLoader has workers
    pins_memory  whether batches are put into pinned memory, without workers
    batch_size, shuffle, drop_last   what a DataLoader says; None: nothing
    notes        what differs from what the user may expect, one text each
    """

    source: Source | Stream
    workers: WorkerPool | None = None
    pins_memory: bool = False
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if a stream does not say."""
        if isinstance(self.source, Stream):
            return self.source.num_samples
        own = source_attribute(self.source, "sample_order")  # of a mixture: some samples may come more than once
        return len(self.source) if own is None else own.num_positions


def open_input(given: Any, name: str) -> DataInput:
    """What is given as `name`, as a feed reads it. Raises DataError if it is no data that a feed can read."""
    if isinstance(given, DataInput):
        return given
    if problems := input_problems(given, name):
        raise DataError(problems, where=name)
    if isinstance(given, DataLoader):
        return _open_loader(given, name)
    if isinstance(given, IterableDataset):
        return DataInput(Stream(given), notes=_stream_notes(given, name, num_workers=0))
    return DataInput(given)


def _open_loader(loader: "DataLoader[Any]", name: str) -> DataInput:
    dataset: Any = loader.dataset
    # torch's own collate function would drop keys and convert dtypes silently; ours makes the same batches, or raises.
    collate_fn: Callable[[Any], Any] | None = None if loader.collate_fn is default_collate else loader.collate_fn
    options: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(dataset, IterableDataset):
        stream = Stream(dataset, collate_fn, loader=loader if loader.num_workers or loader.pin_memory else None)
        return DataInput(stream, notes=_stream_notes(dataset, name, num_workers=loader.num_workers), **options)
    source = dataset if collate_fn is None else CollatedSource(dataset, collate_fn)
    shuffle, notes = isinstance(loader.sampler, RandomSampler), ()
    if shuffle:
        notes = (f"{name}: shuffled by the feed and its seed, not by the sampler of the DataLoader",)
    workers = WorkerPool(loader, source) if loader.num_workers else None
    pins_memory = loader.pin_memory and workers is None
    return DataInput(source, workers, pins_memory, shuffle=shuffle, notes=notes, **options)


def _stream_notes(dataset: Any, name: str, *, num_workers: int) -> tuple[str, ...]:
    lost = [
        f"{name} is a stream ({type(dataset).__name__}): the feed does not shuffle it; every rank reads all of it "
        "and keeps its part of each batch; a resumed run reads again what it had read"
    ]
    if num_workers > 1:
        lost.append(
            f"{name}: each of the {num_workers} workers makes batches of its own samples, so the order depends on "
            "how many there are; if the dataset does not divide its samples among them "
            f"(torch.utils.data.get_worker_info), each sample comes {num_workers} times"
        )
    return tuple(lost)


def input_problems(given: Any, name: str) -> list[Problem]:
    """What is wrong with data that a user gives; nothing if a feed can read it."""
    if isinstance(given, DataInput):
        return []
    if isinstance(given, DataLoader):
        return loader_problems(given, name)
    if isinstance(given, IterableDataset):
        return []
    return _source_problems(given, name)


def _source_problems(source: Any, name: str) -> list[Problem]:
    got = argument_checks.format_argument(name, source)
    if isinstance(source, Mapping | str | bytes):
        keys = [key for key in source if isinstance(key, str)] if isinstance(source, Mapping) else []
        of_datasets = type(source).__module__.startswith("datasets.")
        attempt = f"{name}[{keys[0]!r}]" if keys and of_datasets else "a list of (inputs, targets)"
        return [Problem(got, INDEXABLE_NEED, attempt)]
    has_samples = hasattr(source, "__getitem__") or hasattr(source, "fetch")
    if not has_samples or not hasattr(source, "__len__"):
        attempt = "list(source), if it fits into memory" if hasattr(source, "__iter__") else ""
        return [Problem(got, INDEXABLE_NEED, attempt)]
    try:
        return [] if len(source) else [Problem(f"{name} without samples", "at least one")]
    except Exception as error:  # a length that is negative or too large, or an error of the source's own
        return [Problem(f"{got}: {str(error) or type(error).__name__}", INDEXABLE_NEED)]


def loader_problems(loader: "DataLoader[Any]", name: str) -> list[Problem]:
    """Why a feed cannot read the dataset of a DataLoader in its place."""
    problems = []
    if type(loader).__iter__ is not DataLoader.__iter__:
        got = f"{name} = a {type(loader).__name__}, which overrides __iter__"
        problems.append(Problem(got, "a torch DataLoader", "the DataLoader before it is wrapped"))
    if not isinstance(loader.dataset, IterableDataset):
        problems += _source_problems(loader.dataset, f"{name}.dataset")
    if loader.batch_sampler is None:
        need = "samples that the feed makes batches of"
        problems.append(Problem(f"{name} with batch_size=None", need, "a dataset of samples, and batch_size=64"))
    elif loader.batch_size is None:
        got = f"{name} with a batch sampler ({type(loader.batch_sampler).__name__})"
        need = "batches of batch_size samples: the feed makes them"
        problems.append(Problem(got, need, "batch_size=… and shuffle=…"))
    elif not problems and not isinstance(loader.dataset, IterableDataset):
        problems += _sampler_problems(loader, name)
    return problems


def _sampler_problems(loader: "DataLoader[Any]", name: str) -> list[Problem]:
    sampler, length = loader.sampler, len(loader.dataset)  # pyright: ignore[reportArgumentType]
    if isinstance(sampler, DistributedSampler):
        attempt = "DataLoader(dataset, batch_size=…, shuffle=True): the feed gives each rank its part"
        return [Problem(f"{name} with a DistributedSampler", "the whole dataset on every rank", attempt)]
    if is_of_shuffle(sampler, length):
        return []
    got = f"{name} with a custom sampler ({type(sampler).__name__})"
    attempt = "torch.utils.data.Subset for some of the samples, or a dataset in the order you want"
    return [Problem(got, "shuffle=True or False, over all samples once", attempt)]


def is_of_shuffle(sampler: Any, length: int) -> bool:
    """Whether a sampler is one that `shuffle` makes: every sample once, in order or at random."""
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    return (is_random or type(sampler) is SequentialSampler) and len(sampler) == length


class TaskInputs(NamedTuple):
    """What a task trains on, and what it is evaluated on."""

    train: DataInput
    valid: DataInput | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from what the user may expect."""
        of_valid = self.valid.notes if self.valid is not None and isinstance(self.valid.source, Stream) else ()
        return self.train.notes + of_valid  # in which order samples are evaluated changes nothing


def open_data(data: Any, *, where: str) -> TaskInputs:
    """What a task's `data` function has returned. Raises DataError with all problems."""
    if not isinstance(data, Data):
        got = argument_checks.format_argument("data()", data)
        problem = Problem(got, "the task's data() to return a Data", "ff.Data(train=source)")
        raise DataError(problem, where=where)
    problems = input_problems(data.train, "train")
    problems += [] if data.valid is None else input_problems(data.valid, "valid")
    if problems:
        raise DataError(problems, where=where)
    return TaskInputs(open_input(data.train, "train"), None if data.valid is None else open_input(data.valid, "valid"))
