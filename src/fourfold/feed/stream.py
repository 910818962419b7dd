"""Streams: samples without numbers, which can only be read from the first one on (torch's `IterableDataset`).

global batch  the next `batch_size` samples of the stream; with workers, of one worker's stream, the workers in turn
Law: every rank reads the whole stream and keeps its part of each global batch. So the local batches of all data ranks
together are the same samples as on one rank, if the stream gives all ranks the same samples.

What a source has and a stream has not: a shuffle by the feed, a number for each sample, and a resume that does not read
again what was read before.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fourfold.feed.sample_rng import (
    Fingerprint,
    are_current,
    fingerprint_of,
    generator_states,
    restore,
    seed_generators,
)
from fourfold.feed.source import add_sample_note, empty_like, make_batch
from fourfold.feed.workers import copy_loader, raise_refused, refused
from fourfold.orders.sample_order import shard_range
from fourfold.words.errors import Problem

_END = object()


@dataclasses.dataclass(frozen=True)
class StreamPart:
    """Which part of a stream a rank reads, in which epoch. `size`: the number of data ranks."""

    seed: int
    epoch: int
    batch_size: int
    size: int = 1
    index: int = 0


class StreamBatch(NamedTuple):
    """One data rank's part of a global batch of `num_samples` samples.

    probe: the fingerprint of the stream's first sample, with the first batch if there are several data ranks.
    """

    num_samples: int
    local: Any
    probe: Fingerprint | None = None


class Stream:
    """An iterable dataset, and how its samples become batches."""

    def __init__(
        self,
        dataset: "IterableDataset[Any]",
        collate_fn: Callable[[Any], Any] | None = None,
        *,
        loader: "DataLoader[Any] | None" = None,
    ) -> None:
        """`loader`: a DataLoader whose workers read, or whose `pin_memory` counts."""
        self.dataset, self._collate_fn, self._loader = dataset, collate_fn, loader
        self.uses_rng = False
        """Whether samples read in this process have drawn random numbers: then no other code may draw meanwhile."""

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if the dataset does not say, or several workers divide it."""
        has_length = hasattr(self.dataset, "__len__")
        if not has_length or (self._loader is not None and self._loader.num_workers > 1):
            return None
        try:
            return len(self.dataset)  # pyright: ignore[reportArgumentType]
        except TypeError:  # as a Dataset says it that does not know
            return None

    def head(self, num_samples: int) -> "Stream":
        """The first samples, read in this process."""
        return Stream(_Head(self.dataset, num_samples), self._collate_fn)

    def batches(self, part: StreamPart) -> Iterator[StreamBatch]:
        """One rank's batches of an epoch, from its first one on. Datasets with `set_epoch` learn which epoch it is."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(part.epoch)  # pyright: ignore[reportAttributeAccessIssue]
        if self._loader is None:
            yield from self.read(part)
        else:
            yield from raise_refused(copy_loader(self._loader, _WorkerStream(self, part)))

    def read(self, part: StreamPart) -> Iterator[StreamBatch]:
        """The same, read in this process."""
        info = get_worker_info()
        reader = _Reader(self.dataset, part, num_readers=info.num_workers if info else 1, index=info.id if info else 0)
        is_first = True
        while True:
            # In a worker nothing else draws: there samples are always seeded, and nothing is put back.
            before = generator_states() if reader.uses_rng and info is None else None
            try:
                samples, number = reader.next_samples(part.batch_size)
                if not samples:
                    return
                after_samples = generator_states() if before is not None else None
                batch = self._local_batch(samples, number, part, is_first=is_first)
                if after_samples is not None:
                    reader.uses_rng = reader.has_drawn or not are_current(after_samples)
                    self.uses_rng = reader.uses_rng
            finally:
                if before is not None:
                    restore(before)
            is_first = False
            yield batch

    def _local_batch(self, samples: list[Any], number: int, part: StreamPart, *, is_first: bool) -> StreamBatch:
        start, stop = shard_range(0, len(samples), part.size, part.index)
        own, numbers = samples[start:stop] or samples[:1], range(number + start, number + max(stop, start + 1))
        batch = make_batch(own, numbers, self._collate_fn)
        probe = None
        if is_first and part.size > 1:
            probe = fingerprint_of(make_batch(samples[:1], [number], self._collate_fn))
        return StreamBatch(len(samples), batch if start < stop else empty_like(batch), probe)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loader": None}  # for a worker: the loader may hold what cannot be sent


class _Head(IterableDataset[Any]):
    """The first samples of a dataset."""

    def __init__(self, dataset: "IterableDataset[Any]", num_samples: int) -> None:
        self._dataset, self._num_samples = dataset, num_samples

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, self._num_samples)


class _WorkerStream(IterableDataset[Any]):
    """In a worker: the batches that this worker makes."""

    def __init__(self, stream: Stream, part: StreamPart) -> None:
        self._stream, self._part = stream, part

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._stream.read(self._part)
        except Exception as error:
            yield refused(error)


class _Reader:
    """The samples of a dataset, as one process reads them.

    Every sample is seeded with its number, until a whole batch has drawn nothing.
    """

    def __init__(self, dataset: Any, part: StreamPart, *, num_readers: int, index: int) -> None:
        self._dataset, self._part = dataset, part
        self._num_readers, self._index, self._num_read = num_readers, index, 0
        self._samples: Iterator[Any] | None = None
        self.uses_rng = True
        """Whether to seed samples; so until the first batch has been read."""
        self.has_drawn = False
        """Whether a sample, or the beginning of the dataset, has drawn random numbers."""

    def next_samples(self, count: int) -> tuple[list[Any], int]:
        """The next samples, at most `count`, and the number of the first one."""
        first, samples = self._num_read, []
        while len(samples) < count:
            seeded = None
            if self.uses_rng:
                seed_generators(self._part.seed, self._part.epoch, self._num_read * self._num_readers + self._index)
                seeded = None if self.has_drawn else generator_states()
            try:
                if self._samples is None:
                    self._samples = iter(self._dataset)
                sample = next(self._samples, _END)
            except Exception as error:
                add_sample_note(error, self._dataset, [self._num_read])
                raise
            self.has_drawn = self.has_drawn or (seeded is not None and not are_current(seeded))
            if sample is _END:
                break
            samples.append(sample)
            self._num_read += 1
        return samples, first


def split_batch_problem(position: int, begin: int, end: int) -> Problem:
    """The problem of a state from which a stream cannot be continued: it is inside a batch."""
    got = f"position {position} of a stream, and a batch of its samples {begin} to {end - 1}"
    return Problem(got, "a position where a batch begins", "the batch size and the workers of the run that is resumed")


def stream_end_problem(position: int, num_samples: int, batch_size: int) -> Problem:
    """The problem of a stream that ends before it has given a batch after `position`."""
    if position:
        got = f"position {position} of a stream that ends after {num_samples} samples"
        return Problem(got, "the stream as it was when the state was saved")
    got = f"a stream of {num_samples} samples" if num_samples else "a stream without samples"
    need = f"a whole batch of {batch_size}, as drop_last=True" if num_samples else "at least one sample in every epoch"
    return Problem(got, need, "" if num_samples else "a dataset whose __iter__ begins again each time")
