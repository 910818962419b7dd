"""Plain files with what other formats have: batches with text, chosen columns, a target.

Law: a record is the sample of the file's own source, with its lists of numbers as tensors.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fourfold.feed.files.arrays import ArrayRows
from fourfold.feed.formats.source import stackable
from fourfold.feed.pack.schema import PAIR
from fourfold.words.errors import DamagedSample


class PlainRecords:
    """The samples of a source of plain files."""

    bytes_read = None

    def __init__(self, source: Any) -> None:
        self._source, self.name = source, source.name
        self.classes: Sequence[str] | None = getattr(source, "classes", None)
        self._sample = getattr(source, "pack_sample", source.__getitem__)  # images stay encoded
        self.shard_sizes = _shard_sizes(source)
        self._starts = [0, *accumulate(self.shard_sizes)]

    def key(self, file: int, record: int) -> str:
        return self._source.sample_key(self._starts[file] + record)

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        return [self._read(self._starts[file] + record) for record in records]

    def _read(self, number: int) -> dict[str, Any]:
        try:
            sample = self._sample(number)
        except DamagedSample as error:
            raise ValueError(error.reason) from error
        values = sample if isinstance(sample, dict) else dict(zip(PAIR, sample, strict=True))
        return {name: stackable(value) for name, value in values.items()}


def _shard_sizes(source: Any) -> Sequence[int]:
    if isinstance(source, ArrayRows):
        return [len(source)]
    own: Sequence[int] | None = getattr(source, "shard_sizes", None)
    return [1] * len(source) if own is None else own
