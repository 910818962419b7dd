"""Evaluation batches: a source or a stream from its beginning to its end, read ahead, each data rank its part.

Law: the data ranks' parts together have every sample once; every rank gets equally many batches, some of them empty.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from fourfold.comm.communicator import Communicator
from fourfold.feed.data_input import DataInput
from fourfold.feed.position import read_expected
from fourfold.feed.reading import FETCHED, BatchReader, prefetch
from fourfold.feed.sample_rng import Fingerprint
from fourfold.feed.sharing.channel import IsOpen
from fourfold.feed.sharing.shared_reads import OWN_READS, Key, Loop, open_shared_reads
from fourfold.feed.stream import Stream, StreamPart, stream_end_problem
from fourfold.feed.workers import Request
from fourfold.orders.sample_order import shard_range
from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.words.errors import DataError


class EvaluationBatch(NamedTuple):
    """This rank's part of a batch. `is_empty`: it has no samples; `values` is then a batch of none, or None.

    probe: of the stream's first sample, with a first batch if there are several data ranks.
    """

    values: Any
    is_empty: bool = False
    damaged: Sequence[DamagedRecord] = ()
    probe: Fingerprint | None = None


class EvaluationBatches:
    """The batches of one of `size` data ranks. `batch_size` is global."""

    def __init__(self, data: DataInput, batch_size: int, *, size: int, index: int) -> None:
        self._input, self._batch_size, self._size, self._index = data, batch_size, size, index
        self._reader, self._reads = BatchReader(data), OWN_READS

    def share_reads(self, comm: Communicator) -> None:
        """Read once what the ranks of a host need that have the same data index. Collective among `comm`'s ranks."""
        self._reads = open_shared_reads(comm, self._index)

    def read_ahead(self, check_peers: Callable[[], None]) -> Generator[EvaluationBatch, None, None]:
        """All batches; the first one is never None. `check_peers` is called while this rank waits for one."""
        batches = self._stream_batches if isinstance(self._input.source, Stream) else self._source_batches
        return prefetch(batches, is_on_demand=lambda: self._reader.uses_rng, check_peers=check_peers)

    def _source_batches(self, is_open: IsOpen) -> Iterator[EvaluationBatch]:
        source: Any = self._input.source
        num_samples = len(source)
        start, stop = shard_range(0, num_samples, self._size, self._index)
        local_size = max(1, self._batch_size // self._size)
        longest = max(len(range(*shard_range(0, num_samples, self._size, rank))) for rank in range(self._size))
        firsts = range(start, start + longest, local_size)
        parts = [range(min(first, stop), min(first + local_size, stop)) for first in firsts]
        own = [part for part in parts if part] or parts[:1]
        keys = (Key(0, 0, part.start, part.stop, f"{num_samples}, in order") for part in own)
        requests = (Request(0, 0, part) for part in own)
        loop = Loop(keys, lambda: read_expected(source, self._reader.read(requests), iter(own)), FETCHED, is_open)
        for part, fetched in zip(own, self._reads.items(loop), strict=True):
            yield EvaluationBatch(fetched.values, len(fetched.left_out) == len(part), fetched.damaged)
        yield from [EvaluationBatch(None, is_empty=True)] * (len(parts) - len(own))

    def _stream_batches(self, is_open: IsOpen) -> Iterator[EvaluationBatch]:
        own_part = StreamPart(0, 0, self._batch_size, self._size, self._index)
        num_batches = 0
        for each in self._reader.read_stream(self._reads, own_part, is_open):
            start, stop = shard_range(0, each.num_samples, self._size, self._index)
            yield EvaluationBatch(each.local, is_empty=start == stop, probe=each.probe)
            num_batches += 1
        if not num_batches and is_open():
            raise DataError(stream_end_problem(0, 0, self._batch_size), where="the validation data")
