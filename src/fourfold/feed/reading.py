"""Reading: the batches of a source, as this process reads them.

on demand  how samples that draw random numbers are read: no other code draws meanwhile
Law: which samples a batch has, and what is in them, depends on the request alone.
"""

from collections.abc import Iterable, Iterator

from fourfold.feed.data_input import DataInput
from fourfold.feed.readable import Fetched, fetch_readable
from fourfold.feed.sample_rng import fetch_seeded
from fourfold.feed.sharing.shared_reads import Form
from fourfold.feed.source import pin_batch
from fourfold.feed.stream import Stream, StreamBatch
from fourfold.feed.transform import in_epoch
from fourfold.feed.workers import Request
from fourfold.plan.damaged_samples import DamagedRecord

FETCHED = Form[Fetched](
    lambda each: (each.values, list(each.left_out), list(map(tuple, each.damaged))),
    lambda tree: Fetched(tree[0], tree[1], [DamagedRecord(*record) for record in tree[2]]),
)
STREAMED = Form[StreamBatch](tuple, lambda tree: StreamBatch(*tree))


class BatchReader:
    """Reads the batches of a source, by its workers if it has some."""

    def __init__(self, data: DataInput) -> None:
        self._input = data
        self.uses_rng = False
        """Whether samples that this process has read draw random numbers: then batches are read on demand."""

    def read(self, requests: Iterable[Request]) -> Iterator[Fetched]:
        """The batches of these samples, as far as they can be read."""
        if self._input.workers is not None:
            yield from self._input.workers.read(requests)
            return
        for number, request in enumerate(requests):
            fetched = self._fetch(request, is_first=number == 0)
            yield fetched._replace(values=pin_batch(fetched.values)) if self._input.pins_memory else fetched

    def _fetch(self, request: Request, *, is_first: bool) -> Fetched:
        """A batch. The first one shows whether samples draw random numbers: no other code draws while it is read."""
        assert not isinstance(self._input.source, Stream)
        source = in_epoch(self._input.source, request.seed, request.epoch)
        if not is_first and not self.uses_rng:
            return fetch_readable(source, request.numbers)
        options = {"seed": request.seed, "epoch": request.epoch, "uses_rng": self.uses_rng}
        batch, self.uses_rng = fetch_seeded(source, request.numbers, **options)
        return batch
