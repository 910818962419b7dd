"""DataLoader: `shard` makes a torch DataLoader read only its data rank's samples of every epoch.

global batch  what all data ranks train on together: `batch_size` samples from each
tail          the samples that remain when no further global batch can be filled
Law: the batches of all data ranks together are those of a `Feed` with the same seed, in the same order, and each sample
comes once. A rank without a sample of the tail repeats one of them, so that all ranks have equally many batches.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from fourfold.feed.data_input import is_of_shuffle
from fourfold.feed.data_rank import dp_size_and_index
from fourfold.orders.sample_order import rows, shard_range
from fourfold.plan.plan import Plan
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem

Sample = TypeVar("Sample", covariant=True)


class ShardSampler(Sampler[int]):
    """The samples of one data rank: each iteration is an epoch, with an order of its own if `shuffle`."""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        size_and_index: tuple[int, int],
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        """`size_and_index`: the number of data ranks, and this rank's index among them."""
        self._num_samples, self._batch_size, (self._size, self._index) = num_samples, batch_size, size_and_index
        self._seed, self._shuffle, self._epoch = seed, shuffle, 0
        global_batch_size = batch_size * self._size
        self._tail_start = num_samples // global_batch_size * global_batch_size
        self._has_tail = self._tail_start < num_samples and not drop_last

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration this epoch. Raises DataError if it is not a whole number."""
        if problems := argument_checks.int_problems("epoch", epoch, minimum=0):
            raise DataError(problems, where="set_epoch")
        self._epoch = int(epoch)

    def __len__(self) -> int:
        return self._tail_start // self._size + (len(range(*self._tail_range())) if self._has_tail else 0)

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for start in range(0, self._tail_start, self._batch_size * self._size):
            yield from self._ids(
                epoch, *shard_range(start, start + self._batch_size * self._size, self._size, self._index)
            )
        if self._has_tail:
            yield from self._ids(epoch, *self._tail_range())

    def _tail_range(self) -> tuple[int, int]:
        start, stop = shard_range(self._tail_start, self._num_samples, self._size, self._index)
        if start < stop:
            return start, stop
        again = self._tail_start + self._index % (self._num_samples - self._tail_start)
        return again, again + 1

    def _ids(self, epoch: int, start: int, stop: int) -> list[int]:
        if self._shuffle:
            return rows(self._num_samples, self._seed, epoch, start, stop).tolist()
        return list(range(start, stop))


def shard(
    loader: DataLoader[Sample], plan: Plan | None = None, *, seed: int = 0, split_batches: bool = False
) -> DataLoader[Sample]:
    """The same loader over this data rank's samples; dataset, workers, collate function and all else stay as they are.

    `batch_size` stays the size per rank; the global batch is that times the number of data ranks. With `split_batches`
    the loader's `batch_size` is that of the global batch: a script then trains on the same batches on any number of
    ranks, and without shuffling on those of the loader itself, in their order. Without a plan all ranks are data ranks;
    with a plan of cp > 1, the ranks of one sequence get the same samples. A loader with `shuffle=True` is shuffled by
    `seed`, in a new order at every iteration; so every rank must begin equally many iterations.
    `loader.sampler.set_epoch(n)` sets the next epoch, to resume a run. Workers draw different random numbers on each
    data rank, from `seed` and the seed of the loader's generator, if it has one.

    All ranks have equally many batches, and each sample comes once in an epoch, with one exception: if fewer samples
    remain for the last batch than there are ranks, each rank without a sample repeats one of these. The last batch may
    be smaller, and on some ranks by one sample smaller than on others; `drop_last=True` drops it, on all ranks.

    Raises DataError for an IterableDataset, for a batch sampler, for a sampler other than those that `shuffle` makes,
    for fewer samples than the ranks need, and for batches that cannot be split evenly.
    """
    problems = argument_checks.seed_problems(seed) + argument_checks.instance_problems(
        "plan", plan, Plan, optional=True, attempt="ff.Plan(dp=2)"
    )
    if not isinstance(loader, DataLoader):
        got = f"a {type(loader).__name__}"
        problems.append(Problem(got, "a torch DataLoader", "ff.Feed(dataset, batch_size=…)"))
    else:
        problems += _loader_problems(loader)
    if problems:
        raise DataError(problems, where="ff.shard")
    size_and_index = dp_size_and_index(plan, where="ff.shard")
    num_parts = size_and_index[0] if split_batches else 1
    batch_size = loader.batch_size and loader.batch_size // num_parts
    if problems := _split_problems(loader, num_parts) or _too_few_problems(loader, size_and_index[0], batch_size):
        raise DataError(problems, where="ff.shard")
    shuffle, dataset = isinstance(loader.sampler, RandomSampler), loader.dataset
    options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": loader.drop_last}
    sampler = ShardSampler(_length(loader), batch_size or 1, size_and_index, **options)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=_worker_generator(loader, size_and_index, seed),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def _worker_generator(loader: DataLoader[Any], size_and_index: tuple[int, int], seed: int) -> Any:
    """The generator that seeds the workers. It differs between data ranks, which mostly have the same seed."""
    size, index = size_and_index
    if size == 1:
        return loader.generator
    base = 0 if loader.generator is None else loader.generator.initial_seed()
    digest = hashlib.blake2b(f"fourfold workers {base} {seed} {index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _loader_problems(loader: DataLoader[Any]) -> list[Problem]:
    """Why the samples of this loader cannot be divided among ranks by their numbers."""
    if isinstance(loader.dataset, IterableDataset):
        need = "a dataset with a length and numbered samples: each rank would read the whole stream"
        attempt = "a stream of every ff.world().size-th sample, from the ff.world().rank-th on"
        return [Problem("an IterableDataset", need, attempt)]
    if not hasattr(loader.dataset, "__len__"):
        got = f"a dataset without a length ({type(loader.dataset).__name__})"
        return [Problem(got, "len(dataset): the number of samples to divide", "a dataset with __len__")]
    problems = []
    if type(loader).__iter__ is not DataLoader.__iter__:
        got = f"a {type(loader).__name__}, which overrides __iter__"
        problems.append(Problem(got, "a torch DataLoader", "ff.shard before it is wrapped"))
    if loader.batch_size is None and loader.batch_sampler is not None:
        got, need = f"a batch sampler ({type(loader.batch_sampler).__name__})", "batches of batch_size samples"
        problems.append(Problem(got, need, "batch_size=… and shuffle=…, or a batch sampler made for ff.world().rank"))
    elif isinstance(loader.sampler, DistributedSampler | ShardSampler):
        got = f"a loader that is sharded already ({type(loader.sampler).__name__})"
        problems.append(Problem(got, "one over the whole dataset", "the loader as it is, without ff.shard"))
    elif not is_of_shuffle(loader.sampler, _length(loader)):
        need = "shuffle=True or False, over all samples once"
        attempt = "torch.utils.data.Subset for some of the samples, or a sampler made for ff.world().rank"
        problems.append(Problem(f"a custom sampler ({type(loader.sampler).__name__})", need, attempt))
    return problems


def _split_problems(loader: DataLoader[Any], num_parts: int) -> list[Problem]:
    """Why the loader's batches cannot be split into equal parts."""
    if num_parts == 1:
        return []
    if loader.batch_size is None:
        need = "batches that can be split among the data ranks"
        return [Problem("split_batches = True, and a loader without batches", need, "batch_size=…")]
    if loader.batch_size % num_parts == 0:
        return []
    below = loader.batch_size // num_parts * num_parts
    got = f"batch_size = {loader.batch_size}, to be split among {num_parts} data ranks"
    attempt = f"batch_size={below} or {below + num_parts}" if below else f"batch_size={num_parts}"
    return [Problem(got, f"a multiple of {num_parts}", attempt)]


def _too_few_problems(loader: DataLoader[Any], size: int, batch_size: int | None) -> list[Problem]:
    """Why an epoch leaves a data rank without a batch. `batch_size`: of a rank."""
    required = size * ((batch_size or 1) if loader.drop_last else 1)
    if (length := _length(loader)) >= required:
        return []
    each = "a whole batch for each data rank, as drop_last=True" if loader.drop_last else "one for each data rank"
    attempt = "a smaller batch_size, or drop_last=False" if loader.drop_last else "more samples, or fewer ranks"
    return [Problem(f"{length} samples for {size} data ranks", f"at least {required}: {each}", attempt)]


def _length(loader: DataLoader[Any]) -> int:
    dataset: Any = loader.dataset
    return len(dataset)
