"""Feed: the batches of one rank, prefetched by a thread.

state        (seed, epoch, position, num_samples): which samples the feed has yielded; independent of ranks and prefetch
local batch  this data rank's part of a global batch; if a batch does not divide evenly, parts differ by one sample
block        consecutive local batches with at least `BLOCK` samples together, or the last ones of an epoch
Law: the local batches of all data ranks together are `plan.sample_order.rows` of the batch's positions, on any mesh.
Law: the ids of each batch are its `sample_ids()`; no more than a block and a batch of them are kept.

An order costs some 40 numpy calls, whatever the number of positions: in batches of 64 about 1 to 4.5 µs per id, in
blocks of `BLOCK` less than 0.1 µs.
"""

import functools
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fourfold.comm import init
from fourfold.comm.communicator import Communicator
from fourfold.feed.batches import HOST_BATCHES, Batch, DeviceBatches, DictBatch, device_batches
from fourfold.feed.data_input import DataInput, input_problems, open_input
from fourfold.feed.data_rank import dp_size_and_index
from fourfold.feed.position import (
    Position,
    describe_order,
    length_mismatch,
    make_order,
    make_state_dict,
    order_problems,
    position_problems,
    read_expected,
    state_dict_problems,
)
from fourfold.feed.readable import Fetched, check_damage
from fourfold.feed.reading import FETCHED, BatchReader, prefetch
from fourfold.feed.sample_rng import Fingerprint, probe_source
from fourfold.feed.sharing.channel import IsOpen
from fourfold.feed.sharing.shared_reads import OWN_READS, UNOPENED_READS, Key, Loop, Reads, open_shared_reads
from fourfold.feed.source import CollatedSource, sample_names, source_attribute
from fourfold.feed.stream import Stream, StreamPart, split_batch_problem, stream_end_problem
from fourfold.feed.transform import SampleTransform, transformed
from fourfold.feed.workers import Request
from fourfold.orders.sample_order import (
    BatchRange,
    GlobalOrder,
    InOrder,
    SampleOrder,
    num_batches,
    shard_range,
)
from fourfold.plan.damaged_samples import DamagedRecord, new_records
from fourfold.plan.plan import Plan
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem
from fourfold.words.noop import noop

# ---- ids ahead ------------------------------------------------------------------------------------------------------


BLOCK = 8192  # the chunk that `keyed_permutation` works on; the first batch waits for one block, less than 1 ms


def with_ids(batches: Iterable[BatchRange], *, block: int = BLOCK) -> Iterator[tuple[BatchRange, list[int]]]:
    """Batches of one epoch in one order, of which no sample is left out, each with the ids of this rank's samples."""
    waiting: list[BatchRange] = []
    num_samples = 0
    for batch in batches:
        waiting.append(batch)
        num_samples += batch.local_stop - batch.local_start
        if num_samples >= block:
            yield from _compute(waiting)
            waiting, num_samples = [], 0
    if waiting:
        yield from _compute(waiting)


def _compute(batches: list[BatchRange]) -> Iterator[tuple[BatchRange, list[int]]]:
    first = batches[0]
    order = GlobalOrder(first.num_samples) if first.order is None else first.order
    ranges = [np.arange(batch.local_start, batch.local_stop, dtype=np.int64) for batch in batches]
    ids = order.ids_at(first.seed, first.epoch, np.concatenate(ranges))
    start = 0
    for batch, positions in zip(batches, ranges, strict=True):
        yield batch, ids[start : start + len(positions)].tolist()
        start += len(positions)


# ---- feed -----------------------------------------------------------------------------------------------------------


log = logging.getLogger("fourfold")


class NoLengthError(DataError, TypeError):
    """A length of what has none. A TypeError, so that `list(feed)` works without one."""


class Feed:
    """Iterates over the local batches of an epoch; the next loop is the next epoch. `batch_size` is global.

    source      numbered samples (`len(source)`, `source[i]`), a DataLoader over them, or an IterableDataset
    batch_size  samples of all ranks together; None: that of the DataLoader
    shuffle     a new order in every epoch, by `seed`; None: as the DataLoader says, else True
    drop_last   leave out the samples that remain when no whole batch is left; None: as the DataLoader says, else False
    order       how samples are shuffled: "global", all of them; "windowed", for slow storage: the files, and within a
                window of a few files their samples, by the source's `shard_sizes`. None: global, or that of a mixture
    window      with order = "windowed": how many files are shuffled together
    transform   (sample, torch.Generator) -> sample, or (sample) -> sample; in threads: `ff.Transformed(source, …)`
    bad_samples   how many damaged samples this rank may leave out of its batches; the next one raises
    shared      whether ranks of one host that need the same samples (with a plan of cp, tp or pp) read them once: then
                the first loop over the feed is collective

    Unless `drop_last`, an epoch's last batch holds the remaining samples; a data rank may then get an empty batch,
    which a step accepts. Samples that draw from torch's, Python's or NumPy's generators draw the same numbers on any
    mesh; such samples are not prefetched, but read when their batch is requested, unless workers of a DataLoader read
    them. What a DataLoader or a stream loses is logged once.
    Raises DataError for data that cannot be read, an empty source or a batch size below one.
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
        order: str | None = None,
        window: int | None = None,
        bad_samples: int = 0,
        transform: SampleTransform | None = None,
        shared: bool = True,
    ) -> None:
        source = transformed(source, transform)
        problems = input_problems(source, "source") + argument_checks.seed_problems(seed)
        problems += argument_checks.int_problems("bad_samples", bad_samples, minimum=0)
        if batch_size is not None or not isinstance(source, DataInput | DataLoader):
            problems += argument_checks.int_problems("batch_size", batch_size, minimum=1)
        problems += argument_checks.instance_problems("plan", plan, Plan, optional=True, attempt="ff.Plan(dp=2)")
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last), ("shared", shared)):
            problems += argument_checks.instance_problems(name, value, bool, optional=True, attempt=f"{name}=True")
        if problems:
            raise DataError(problems, where="the feed")
        self._size, self._index = dp_size_and_index(plan, where="the feed")
        self._input = open_input(source, "source")
        self._batch_size = int(batch_size or self._input.batch_size or 0)
        self._drops_last = bool(self._input.drop_last if drop_last is None else drop_last)
        how: dict[str, Any] = {"order": order, "window": window, "shuffle": shuffle}
        if problems := self._size_problems() + order_problems(self._input.source, **how):
            raise DataError(problems, where="the feed")
        self._how = {**how, "default_shuffle": self._input.shuffle is not False}
        self._bad_samples = bad_samples
        self._device: DeviceBatches = HOST_BATCHES
        self._damaged: tuple[DamagedRecord, ...] = ()
        self._state = Position(int(seed), 0, 0, self.num_samples)
        self._has_fingerprint = False
        self._reader = BatchReader(self._input)
        shares = shared and plan is not None and plan.mesh.size > plan.dp
        self._reads: Reads = UNOPENED_READS if shares else OWN_READS
        self.check_peers: Callable[[], None] = noop
        """Called from time to time while the feed waits for a batch; an error that it raises ends the wait."""
        self.leaves_damage_to_caller = False
        """Whether batches leave out any number of damaged samples, which the caller counts over all ranks."""
        if not isinstance(source, DataInput) and init.world().rank == 0:
            for note in self._input.notes:
                log.warning(note)

    def _size_problems(self) -> list[Problem]:
        problems = []
        if not self._batch_size:
            problems.append(Problem("no batch_size", "the samples of a global batch", "batch_size=64"))
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

    def sample_names(self, samples: BatchRange) -> str:
        """This rank's samples of a batch, for people."""
        source = self._input.source
        return sample_names(source.dataset if isinstance(source, Stream) else source, samples.sample_ids())

    def share_reads(self, comm: Communicator) -> None:
        """Read once what the ranks of a host need that have the same data index. Collective among `comm`'s ranks."""
        self._reads = open_shared_reads(comm, self._index)

    def copy_to(self, device: torch.device, *, compares: bool) -> None:
        """Bring batches to a device ahead of the steps; see `device_batches`."""
        self._device = device_batches(device, compares=compares)
        pin_buffers = source_attribute(self._input.source, "pin_buffers")
        # Not where workers read: a process that is forked cannot use the GPU's driver.
        if device.type == "cuda" and pin_buffers is not None and self._input.workers is None:
            pin_buffers()

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
    def sample_order(self) -> SampleOrder | None:
        """The order in which samples come; None for a stream."""
        return make_order(self._input.source, **self._how)

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
        if problems := position_problems(state, self.num_samples):
            raise DataError(problems, where="the feed")
        self._state = Position(*state)

    def state_dict(self) -> dict[str, Any]:
        """The state, and of which order, as JSON values: less than 1 kB, whatever the source."""
        return make_state_dict(self._state._asdict(), self.sample_order)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of another feed; see `load_state`.

        Raises DataError if the samples came in another order there: another kind of order, window, shards or weights.
        """
        if problems := state_dict_problems(state, self.sample_order):
            raise DataError(problems, where="the feed")
        self.load_state(Position(*(state[name] for name in Position._fields)))

    def __len__(self) -> int:
        """Batches of an epoch. Raises DataError for a stream that does not say how long it is."""
        if self.num_samples is None:
            attempt = "a dataset with __len__, or a loop over the feed that counts"
            raise NoLengthError(Problem("the length of a feed from a stream", "a stream with a length", attempt))
        return num_batches(self.num_samples, self._batch_size, drop_last=self._drops_last)

    def __iter__(self) -> Iterator[Any]:
        """The remaining batches of the epoch. The state advances when a batch is yielded, not when it is read."""
        if self._reads is UNOPENED_READS:
            self.share_reads(init.init_communicator())
        epoch = self._state.epoch
        while self._state.epoch == epoch:
            asked = time.perf_counter()
            batches = prefetch(
                functools.partial(self._batches, self._state),
                is_on_demand=lambda: self._reader.uses_rng,
                check_peers=lambda: self.check_peers(),
            )
            try:
                for after, started in batches:
                    self._state, batch = after, self._device.finish(started)
                    if isinstance(batch, Batch | DictBatch):
                        batch.data_seconds = time.perf_counter() - asked
                    yield batch
                    if self._state is not after or after.epoch != epoch:
                        break  # the epoch is over, or `load_state` has moved the feed
                    asked = time.perf_counter()
                else:  # with drop_last, a state that another batch size has left too near to the end
                    self._state = Position(self._state.seed, epoch + 1, 0, self.num_samples)
            finally:
                batches.close()

    def repeat(self) -> Generator[Any, None, None]:
        """Batches without end, epoch after epoch."""
        while True:
            yield from self

    def _batches(self, start: Position, is_open: IsOpen) -> Iterator[tuple[Position, Any]]:
        """The remaining batches of an epoch, each with the state after it."""
        if isinstance(self._input.source, Stream):
            yield from self._stream_batches(start, is_open)
            return
        if problem := length_mismatch(start, self.num_samples):
            raise DataError(problem, where="the feed")
        order, before = self.sample_order, self.bytes_read
        assert order is not None
        loop = Loop(self._keys(start, order), lambda: self._read(start, order), FETCHED, is_open)
        for (after, samples), local in zip(self._ranges(start, order), self._reads.items(loop), strict=False):
            batch = self._wrap(local, samples)
            if before is not None and isinstance(batch, Batch | DictBatch):
                batch.bytes_read = (self.bytes_read or 0) - before
            if self._size > 1 and not self._has_fingerprint and isinstance(batch, Batch | DictBatch):
                self._has_fingerprint, batch.probe = True, self._probe(start.seed)
            before = self.bytes_read
            yield after, self._device.start(batch)

    def _read(self, start: Position, order: SampleOrder) -> Iterator[Fetched]:
        """The same, read by this rank."""
        ranges = (samples for _, samples in self._ranges(start, order))
        requests = (Request(samples.seed, samples.epoch, ids) for samples, ids in with_ids(ranges))
        expected = (ids for _, ids in with_ids(samples for _, samples in self._ranges(start, order)))
        return read_expected(self._input.source, self._reader.read(requests), expected)

    def _keys(self, start: Position, order: SampleOrder) -> Iterator[Key]:
        """Which batches these are, for the ranks that share them."""
        described = describe_order(order)
        of = f"{order.num_positions} ({described['order']}, digest {described['order_digest']})"
        for _, samples in self._ranges(start, order):
            yield Key(samples.seed, samples.epoch, samples.start, samples.stop, of)

    def _wrap(self, fetched: Fetched, samples: BatchRange) -> Any:
        """The batch with its samples. Raises DataError if more are damaged than may be left out."""
        if not fetched.damaged:
            return Batch.wrap(fetched.values, samples)
        self._damaged += new_records(self._damaged, fetched.damaged)
        batch = Batch.wrap(fetched.values, samples._replace(left_out=tuple(fetched.left_out)), fetched.damaged)
        if not (self.leaves_damage_to_caller and isinstance(batch, Batch | DictBatch)):
            check_damage(self._damaged, self._bad_samples)
        return batch

    def _probe(self, seed: int) -> Fingerprint | None:
        source: Any = self._input.source
        return probe_source(source, seed=seed, uses_rng=self._reader.uses_rng) if self._reads.reads else None

    def _ranges(self, start: Position, order: SampleOrder) -> Iterator[tuple[Position, BatchRange]]:
        """The samples of each remaining batch of an epoch, with the state after it."""
        num_samples, (seed, epoch, position, _) = order.num_positions, start
        end = num_samples - self._batch_size + 1 if self._drops_last else num_samples
        while position < end:
            stop = min(position + self._batch_size, num_samples)
            samples = BatchRange(num_samples, seed, epoch, position, stop, *self._local_range(position, stop), order)
            position = stop
            after = (epoch, position) if position < end else (epoch + 1, 0)
            yield Position(seed, *after, num_samples), samples

    def _local_range(self, start: int, stop: int) -> tuple[int, int]:
        return shard_range(start, stop, self._size, self._index)

    def _stream_batches(self, start: Position, is_open: IsOpen) -> Iterator[tuple[Position, Any]]:
        """The remaining batches of a stream's epoch. The one after a batch is read first: it may have been the last."""
        seed, epoch, position, upcoming = start.seed, start.epoch, 0, None
        own_part = StreamPart(seed, epoch, self._batch_size, self._size, self._index)
        for part in self._reader.read_stream(self._reads, own_part, is_open):
            begin, position = position, position + part.num_samples
            if position <= start.position or (self._drops_last and part.num_samples < self._batch_size):
                continue
            if begin < start.position:
                raise DataError(split_batch_problem(start.position, begin, position), where="the feed")
            if upcoming is not None:
                yield Position(seed, epoch, begin), self._device.start(upcoming)
            local, order = self._local_range(begin, position), InOrder(position)
            samples = BatchRange(position, seed, epoch, begin, position, *local, order)
            upcoming = Batch.wrap(part.local, samples)
            if isinstance(upcoming, Batch | DictBatch):
                upcoming.probe, self._has_fingerprint = None if self._has_fingerprint else part.probe, True
        if upcoming is None:
            raise DataError(stream_end_problem(start.position, position, self._batch_size), where="the feed")
        yield Position(seed, epoch + 1, 0), self._device.start(upcoming)
