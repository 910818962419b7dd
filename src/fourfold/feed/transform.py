"""Transforms: what a user's function makes of each sample, such as an augmented image.

transform  (sample, generator) -> sample, which draws from the torch.Generator that it is given; or (sample) -> sample
view       a transformed source in one epoch
Law: the numbers that the generator gives are a function of (seed, epoch, sample). So augmented samples are the same on
any number of ranks and threads, and after a resume.

Transforms run in threads. One that draws from torch's, Python's or NumPy's own generators is called for one sample at a
time, as `sample_rng` does with such samples: the first batch shows it.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import IterableDataset

from fourfold.feed.source import CollatedSource, read_samples, source_attribute
from fourfold.feed.transform_processes import ProcessTransform, TransformError
from fourfold.feed.transform_signature import WHERE, with_generator
from fourfold.words import argument_checks
from fourfold.words.error_notes import error_line
from fourfold.words.errors import DataError, FourfoldError, Problem
from fourfold.words.task import Source

# What a source may have besides its samples. Transforms change none of it.
PASSED_ON = ("bytes_read", "expect_batches", "sample_key", "sample_order", "shard_sizes")
SampleTransform = Callable[..., Any] | str


class Transformed:
    """A source whose samples pass a transform: `transform(source[i], generator)`.

    transform  a function of (sample, generator), or of the sample alone, as torchvision's are; it runs in threads. Or
               "FILE.py:name", which runs in processes of its own
    threads    or processes, that transform the samples of a batch; None: one for each core, at most 16
    Sources are read by one thread, unless they have an attribute `thread_safe` that is true, as `ff.Pack` has.
    Raises DataError for a source without numbered samples; and with the sample for a transform that raises.
    """

    def __init__(self, source: Source, transform: SampleTransform, *, threads: int | None = None) -> None:
        problems = argument_checks.int_problems("threads", threads, minimum=1, optional=True)
        has_samples = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if not has_samples or isinstance(source, IterableDataset):
            got = argument_checks.format_argument("source", source)
            problems.append(Problem(got, "numbered samples, len(source) and source[i]", "the transform in its dataset"))
        if problems:
            raise DataError(problems, where=WHERE)
        self._num_threads = threads or min(16, os.cpu_count() or 1)
        self.source = source
        self.transform = ProcessTransform(transform, self._num_threads) if isinstance(transform, str) else transform
        self.call = with_generator(self.transform)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Any:
        return self.in_epoch(0, 0)[index]

    def __reduce__(self) -> tuple[Any, ...]:  # to a worker process of a DataLoader
        return _remake, (self.source, self.transform, self._num_threads)

    def __getattr__(self, name: str) -> Any:
        if name in PASSED_ON:
            return source_attribute(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def in_epoch(self, seed: int, epoch: int) -> "_EpochView":
        """The samples as they are in this epoch."""
        return _EpochView(self, seed, epoch)

    def map(self, function: Callable[[int], Any], count: int) -> list[Any]:
        """`function(0)` to `function(count - 1)`, in threads. Raises the first error in this order."""
        num_threads = min(self._num_threads, count)
        if num_threads < 2:
            return [function(index) for index in range(count)]
        with self._lock:
            if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
                self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="fourfold transform")
                self._pool_process = os.getpid()
        bounds = [count * part // num_threads for part in range(num_threads + 1)]
        ranges = [range(*bounds[part : part + 2]) for part in range(num_threads)]
        futures = [self._pool.submit(lambda part: [function(index) for index in part], part) for part in ranges]
        errors = [future.exception() for future in futures]  # all have ended before a batch gives up
        for error in errors:
            if error is not None:
                raise error
        return [value for future in futures for value in future.result()]


def _remake(source: Source, transform: SampleTransform, threads: int) -> Transformed:
    return Transformed(source, transform, threads=threads)


class _EpochView:
    """The samples of a transformed source in one epoch."""

    def __init__(self, transformed: Transformed, seed: int, epoch: int) -> None:
        self._transformed, self._seed, self._epoch = transformed, seed, epoch

    def __len__(self) -> int:
        return len(self._transformed)

    def __getitem__(self, index: int, /) -> Any:
        return self._transform(index, read_samples(self._transformed.source, [index])[0])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """These samples, transformed in threads."""
        transformed, source = self._transformed, self._transformed.source
        if getattr(source, "thread_safe", False):
            return transformed.map(lambda row: self[indices[row]], len(indices))
        samples = read_samples(source, indices)
        return transformed.map(lambda row: self._transform(indices[row], samples[row]), len(indices))

    def _transform(self, index: int, sample: Any) -> Any:
        generator = torch.Generator().manual_seed(sample_seed(self._seed, self._epoch, index))
        try:
            return self._transformed.call(sample, generator)
        except FourfoldError:
            raise
        except TransformError as error:
            got = f"{sample_name(self._transformed.source, index)}: {error}"
            raise DataError(Problem(got, "a transform that takes every sample"), where=WHERE) from None
        except Exception as error:
            got = f"{sample_name(self._transformed.source, index)}: {error_line(error)}"
            raise DataError(Problem(got, "a transform that takes every sample"), where=WHERE) from error


def sample_seed(seed: int, epoch: int, number: int) -> int:
    """What seeds the generator of a sample's transform."""
    # Not the seed of `sample_rng`: what a sample draws and what its transform draws must differ.
    text = f"fourfold transform {seed} {epoch} {number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 2**63


def sample_name(source: Any, index: int) -> str:
    """The number of a sample, and its key if the source has keys."""
    key = source_attribute(source, "sample_key")
    return f"sample {index}" if key is None else f"sample {index} ({key(index)})"


def transformed(source: Any, transform: SampleTransform | None) -> Any:
    """The source with this transform, if there is one."""
    return source if transform is None else Transformed(source, transform)


def in_epoch(source: Any, seed: int, epoch: int) -> Any:
    """The source in an epoch: with transforms that draw its numbers, if it has transforms."""
    if isinstance(source, Transformed):
        return source.in_epoch(seed, epoch)
    if isinstance(source, CollatedSource) and isinstance(source.dataset, Transformed):
        return CollatedSource(source.dataset.in_epoch(seed, epoch), source.collate_fn)
    return source
