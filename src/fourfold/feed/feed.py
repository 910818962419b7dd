"""Feed: the batches of one rank, prefetched by a thread.

state        (seed, epoch, position, num_samples): which samples the feed has yielded; independent of ranks and prefetch
local batch  this data rank's part of a global batch; if a batch does not divide evenly, parts differ by one sample
Law: the local batches of all data ranks together are `plan.sample_order.rows` of the batch's positions, on any mesh.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from fourfold.feed.data_input import DataInput, input_problems, open_input
from fourfold.feed.prefetch import prefetch
from fourfold.feed.sample_rng import fetch_seeded
from fourfold.feed.source import CollatedSource, fetch, pin_batch
from fourfold.feed.source_fingerprint import Fingerprint, fingerprint_of, is_same_sample
from fourfold.feed.stream import Stream, StreamPart, split_batch_problem, stream_end_problem
from fourfold.feed.transform import SampleTransform, in_epoch, transformed
from fourfold.feed.workers import Request
from fourfold.parts.comm import init
from fourfold.plan.plan import Plan
from fourfold.plan.sample_order import ORDER_VERSION, UNSHUFFLED, BatchRange, InOrderRange, num_batches, shard_range
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem
from fourfold.words.noop import noop

log = logging.getLogger("fourfold")


class Position(NamedTuple):
    """The state of a feed: it has yielded samples [0, position) of the epoch.

    num_samples  the length of the epoch; None for a stream that does not say, and in states of older versions
    """

    seed: int
    epoch: int
    position: int
    num_samples: int | None = None


torch.serialization.add_safe_globals([Position])  # torch.load accepts a saved state, with weights_only too


class Batch(tuple):
    """A pair (inputs, targets) with the numbers of its samples, which errors name.

    probe: the fingerprint of the feed's source, on a data rank's first batch if there are several data ranks
    (`feed/source_fingerprint.py`).
    data_seconds: how long the loop over the feed waited for it. bytes_read: what was read for it, if the source counts.
    """

    samples: BatchRange
    probe: Fingerprint | None = None
    data_seconds: float | None = None
    bytes_read: int | None = None

    @classmethod
    def wrap(cls, values: Any, samples: BatchRange) -> Any:
        """The pair or dict with the numbers of its samples; other values are returned as they are."""
        if isinstance(values, Mapping):
            batch = DictBatch(values)
        elif type(values) in (tuple, list) and len(values) == 2:
            batch = cls(values)
        else:
            return values
        batch.samples = samples
        return batch


class DictBatch(dict[str, Any]):
    """A dict of inputs with the numbers of its samples; see `Batch`."""

    samples: BatchRange
    probe: Fingerprint | None = None
    data_seconds: float | None = None
    bytes_read: int | None = None


class NoLengthError(DataError, TypeError):
    """A length of what has none. A TypeError, so that `list(feed)` works without one."""


class Feed:
    """Iterates over the local batches of an epoch; the next loop is the next epoch. `batch_size` is global.

    source      numbered samples (`len(source)`, `source[i]`), a DataLoader over them, or an IterableDataset
    batch_size  samples of all ranks together; None: that of the DataLoader
    shuffle     a new order in every epoch, by `seed`; None: as the DataLoader says, else True
    transform   (sample, torch.Generator) -> sample, called in threads: `ff.Transformed(source, transform)`
    drop_last   leave out the samples that remain when no whole batch is left; None: as the DataLoader says, else False

    Unless `drop_last`, an epoch's last batch holds the remaining samples; a data rank may then get an empty batch,
    which a step accepts. Samples that draw from torch's, Python's or NumPy's generators draw the same numbers on any
    mesh; such samples are not prefetched, but read when their batch is requested, unless workers of a DataLoader read
    them. What a DataLoader or a stream loses is logged. Raises DataError for arguments that give no batches.
    """

    def __init__(
        self,
        source: Any,
        plan: Plan | None = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        transform: SampleTransform | None = None,
    ) -> None:
        source = transformed(source, transform)
        problems = input_problems(source, "source") + argument_checks.seed_problems(seed)
        if batch_size is not None or not isinstance(source, DataInput | DataLoader):
            problems += argument_checks.int_problems("batch_size", batch_size, minimum=1)
        problems += argument_checks.instance_problems("plan", plan, Plan, optional=True, attempt="ff.Plan(dp=2)")
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            problems += argument_checks.instance_problems(name, value, bool, optional=True, attempt=f"{name}=True")
        if problems:
            raise DataError(problems, where="the feed")
        self._size, self._index = dp_size_and_index(plan, where="the feed")
        self._input = open_input(source, "source")
        self._batch_size = int(batch_size or self._input.batch_size or 0)
        self._drops_last = bool(self._input.drop_last if drop_last is None else drop_last)
        is_stream = isinstance(self._input.source, Stream)
        self._shuffles = not is_stream and (shuffle if shuffle is not None else self._input.shuffle is not False)
        if problems := self._size_problems(shuffle):
            raise DataError(problems, where="the feed")
        self._state = Position(int(seed), 0, 0, self.num_samples)
        self._uses_rng = self._has_fingerprint = False
        self.check_peers: Callable[[], None] = noop
        """Called from time to time while the feed waits for a batch; an error that it raises ends the wait."""
        if not isinstance(source, DataInput) and init.world().rank == 0:
            for note in self._input.notes:
                log.warning(note)

    def _size_problems(self, shuffle: bool | None) -> list[Problem]:
        problems = []
        if not self._batch_size:
            problems.append(Problem("no batch_size", "the samples of a global batch", "batch_size=64"))
        if shuffle and isinstance(self._input.source, Stream):
            attempt = "a dataset that shuffles itself, such as dataset.shuffle(buffer_size=…) of datasets"
            problems.append(Problem("shuffle = True, and a stream", "numbered samples to shuffle", attempt))
        length = self.num_samples
        if self._drops_last and length is not None and length < self._batch_size:
            got = f"{length} samples, batch_size = {self._batch_size} and drop_last"
            problems.append(Problem(got, "at least one whole batch", f"batch_size={length}, or drop_last=False"))
        return problems

    @classmethod
    def single_rank(cls, source: Any, **options: Any) -> "Feed":
        """A feed of global batches, as in a world of one rank."""
        return cls.of_data_rank(source, size=1, index=0, **options)

    @classmethod
    def of_data_rank(cls, source: Any, *, size: int, index: int, **options: Any) -> "Feed":
        """The feed of one of `size` data ranks, whatever world this process is in."""
        feed = cls(source, **options)
        feed._size, feed._index = size, index
        return feed

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self._batch_size

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if a stream does not say."""
        return self._input.num_samples

    @property
    def bytes_read(self) -> int | None:
        """Bytes that this rank has read from storage so far; None for a source that does not count them."""
        source: Any = self._input.source
        return getattr(source.dataset if isinstance(source, CollatedSource) else source, "bytes_read", None)

    @property
    def order_version(self) -> int:
        """The version of the order in which samples come; 0 where they come as the source has them."""
        return ORDER_VERSION if self._shuffles else UNSHUFFLED

    @property
    def state(self) -> Position:
        """Which samples the feed has yielded; `load_state` continues from there, on any number of ranks."""
        return self._state

    def load_state(self, state: Position) -> None:
        """Continue from the state of another feed over the same source, with the seed and the order of that feed.

        Within a loop over the feed, the next batch comes from the new position; if the state is in another epoch, the
        loop ends. The batch size may differ, because a position counts samples. Raises DataError for a state in the
        middle of an epoch if the number of samples has changed since, because the order has changed with it.
        """
        if problems := _state_problems(state, self.num_samples):
            raise DataError(problems, where="the feed")
        self._state = Position(*state)

    def __len__(self) -> int:
        """Batches of an epoch. Raises DataError for a stream that does not say how long it is."""
        if self.num_samples is None:
            need, attempt = "a stream with a length", "a dataset with __len__, or a loop over the feed that counts"
            raise NoLengthError(Problem("the length of a feed from a stream", need, attempt))
        return num_batches(self.num_samples, self._batch_size, drop_last=self._drops_last)

    def __iter__(self) -> Iterator[Any]:
        """The remaining batches of the epoch. The state advances when a batch is yielded, not when it is read."""
        epoch = self._state.epoch
        while self._state.epoch == epoch:
            asked = time.perf_counter()
            batches = prefetch(
                self._batches(self._state), is_on_demand=lambda: self._uses_rng, check_peers=lambda: self.check_peers()
            )
            for after, batch in batches:
                self._state = after
                if isinstance(batch, Batch | DictBatch):
                    batch.data_seconds = time.perf_counter() - asked
                yield batch
                if self._state is not after or after.epoch != epoch:
                    break  # the epoch is over, or `load_state` has moved the feed
                asked = time.perf_counter()
            else:  # with drop_last, a state that another batch size has left too near to the end
                self._state = Position(self._state.seed, epoch + 1, 0, self.num_samples)

    def repeat(self) -> Generator[Any, None, None]:
        """Batches without end, epoch after epoch."""
        while True:
            yield from self

    def _batches(self, start: Position) -> Iterator[tuple[Position, Any]]:
        """The remaining batches of an epoch, each with the state after it."""
        if isinstance(self._input.source, Stream):
            yield from self._stream_batches(self._input.source, start)
            return
        if problem := _length_mismatch(start, self.num_samples):
            raise DataError(problem, where="the feed")
        before, values = self.bytes_read, self._read(samples for _, samples in self._ranges(start))
        for (after, samples), local in zip(self._ranges(start), values, strict=False):
            batch = Batch.wrap(local, samples)
            if before is not None and isinstance(batch, Batch | DictBatch):
                batch.bytes_read = (self.bytes_read or 0) - before
            if self._size > 1 and not self._has_fingerprint and isinstance(batch, Batch | DictBatch):
                self._has_fingerprint, batch.probe = True, self._source_fingerprint(start.seed)
            before = self.bytes_read
            yield after, batch

    def _ranges(self, start: Position) -> Iterator[tuple[Position, BatchRange]]:
        """The samples of each remaining batch of an epoch, with the state after it."""
        num_samples, (seed, epoch, position, _) = len(self._input.source), start  # pyright: ignore[reportArgumentType]
        kind = BatchRange if self._shuffles else InOrderRange
        end = num_samples - self._batch_size + 1 if self._drops_last else num_samples
        while position < end:
            stop = min(position + self._batch_size, num_samples)
            samples = kind(
                num_samples, seed, epoch, position, stop, *shard_range(position, stop, self._size, self._index)
            )
            position = stop
            after = (epoch, position) if position < end else (epoch + 1, 0)
            yield Position(seed, *after, num_samples), samples

    def _read(self, ranges: Iterable[BatchRange]) -> Iterator[Any]:
        """The batches of these samples."""
        if self._input.workers is not None:
            yield from self._input.workers.read(Request(each.seed, each.epoch, each.sample_ids()) for each in ranges)
            return
        for number, samples in enumerate(ranges):
            batch = self._fetch(samples, is_first=number == 0)
            yield pin_batch(batch) if self._input.pins_memory else batch

    def _fetch(self, samples: BatchRange, *, is_first: bool) -> Any:
        """A batch. The first one shows whether samples draw random numbers: no other code draws while it is read."""
        source = in_epoch(self._input.source, samples.seed, samples.epoch)
        if not is_first and not self._uses_rng:
            return fetch(source, samples.sample_ids())
        seeds = {"seed": samples.seed, "epoch": samples.epoch}
        batch, self._uses_rng = fetch_seeded(source, samples.sample_ids(), **seeds, uses_rng=self._uses_rng)
        return batch

    def _stream_batches(self, stream: Stream, start: Position) -> Iterator[tuple[Position, Any]]:
        """The remaining batches of a stream's epoch. The one after a batch is read first: it may have been the last."""
        seed, epoch, position, upcoming = start.seed, start.epoch, 0, None
        for part in stream.batches(StreamPart(seed, epoch, self._batch_size, self._size, self._index)):
            self._uses_rng = stream.uses_rng
            begin, position = position, position + part.num_samples
            if position <= start.position or (self._drops_last and part.num_samples < self._batch_size):
                continue
            if begin < start.position:
                raise DataError(split_batch_problem(start.position, begin, position), where="the feed")
            if upcoming is not None:
                yield Position(seed, epoch, begin), upcoming
            local = shard_range(begin, position, self._size, self._index)
            samples = InOrderRange(position, seed, epoch, begin, position, *local)
            upcoming = Batch.wrap(part.local, samples)
            if isinstance(upcoming, Batch | DictBatch):
                upcoming.probe, self._has_fingerprint = None if self._has_fingerprint else part.probe, True
        if upcoming is None:
            raise DataError(stream_end_problem(start.position, position, self._batch_size), where="the feed")
        yield Position(seed, epoch + 1, 0), upcoming

    def _source_fingerprint(self, seed: int) -> Fingerprint | None:
        """The fingerprint of the source's middle sample; None if the sample differs each time it is read."""
        options = {"seed": seed, "epoch": 0, "uses_rng": self._uses_rng}
        try:
            source: Any = self._input.source
            twice = [fetch_seeded(source, [len(source) // 2], **options)[0] for _ in range(2)]
        except Exception:  # the batch that holds this sample will raise the error
            return None
        first, second = map(fingerprint_of, twice)
        return first if is_same_sample(first, second) else None


def _state_problems(state: Any, num_samples: int | None) -> list[Problem]:
    """What is wrong with a state, for a feed of `num_samples` samples; None: of a stream."""
    numbers = list(state) if isinstance(state, tuple | list) else []
    if len(numbers) == 4 and numbers[3] is None:
        numbers = numbers[:3]
    if len(numbers) not in (3, 4) or not all(map(argument_checks.is_int, numbers)):
        return [Problem(f"a state {state!r}", "(seed, epoch, position, num_samples), the `state` of another feed")]
    position = Position(*numbers)
    problems = argument_checks.seed_problems(position.seed)
    problems += argument_checks.int_problems("epoch", position.epoch, minimum=0)
    if other := _length_mismatch(position, num_samples):
        problems.append(other)
    elif position.position < 0 or (num_samples is not None and position.position >= num_samples):
        need = "0 or more" if num_samples is None else f"one before the source's {num_samples} samples"
        problems.append(Problem(f"position {position.position}", need))
    return problems


def _length_mismatch(state: Position, num_samples: int | None) -> Problem | None:
    """The problem if the source had another length when the state's epoch began: its order differs then."""
    if state.position == 0 or num_samples is None or state.num_samples in (None, num_samples):
        return None
    got = f"position {state.position} in an epoch of {state.num_samples} samples, and a source of {num_samples} now"
    attempt = f"the source as it was, or ({state.seed}, {state.epoch + 1}, 0), the beginning of the next epoch"
    return Problem(got, "the same number of samples until the epoch is over", attempt)


def dp_size_and_index(plan: Plan | None, *, where: str) -> tuple[int, int]:
    """The size of the data axis and this rank's index on it. Raises DataError for a plan of another number of ranks."""
    world = init.world()
    if plan is None:
        return world.size, world.rank
    if plan.mesh.size != world.size:
        got = f"a plan of {plan.mesh.size} ranks in a world of {world.size}"
        attempt = "the plan that the model is trained with, or no plan: then all ranks are data ranks"
        raise DataError(Problem(got, "one for each rank", attempt), where=where)
    return plan.dp, plan.mesh.coordinates(world.rank)["dp"]
