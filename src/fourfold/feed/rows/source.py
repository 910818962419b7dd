"""Row source: the rows of a database as samples, fetched by key in the order of the feed.

sample  a dict of the row's columns without the key; or a pair, if a `target` is named
Law: sample i is the row with the i-th key, with the values it had when the index was made. A row that has changed
since, or is gone, or has a value that its column cannot have, is no sample.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.environment.temporary_folder import temporary_folder
from fourfold.feed.rows.columns import Columns
from fourfold.feed.rows.database import Database, Row, retried
from fourfold.feed.rows.row_index import RowIndex, open_index, row_digest
from fourfold.feed.source import empty_like, make_batch
from fourfold.feed.staging.origin import Backoff, Result
from fourfold.words.errors import DamagedSample

NUM_TYPED = 64  # rows, spread evenly, that show the types of the columns


class RowSource:
    """Numbered samples of a database. `fetch` reads a batch in one query."""

    def __init__(
        self, database: Database, columns: Columns, *, of: str, index: str | None = None, backoff: Backoff | None = None
    ) -> None:
        """`of`: what the index is of."""
        self._database, self._columns, self._backoff = database, columns, backoff or Backoff()
        # The mapping of an index in a temporary folder lives on when its files have no name any more.
        with temporary_folder() if index is None else contextlib.nullcontext(Path(index)) as folder:
            self._index: RowIndex = self._retry(lambda: open_index(folder, of, self._digested()))
        some = [number * len(self) // NUM_TYPED for number in range(NUM_TYPED)]
        columns.learn_types(self._query([each.key for each in self._index.rows(list(dict.fromkeys(some)))]))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int, /) -> Any:
        return self._sample(number, self._read([number])[0])

    def fetch(self, numbers: Sequence[int], /) -> Any:
        """The batch of these samples."""
        wanted = list(numbers) or [0]
        rows = self._read(wanted)
        batch = self._columns.batch(rows)
        if batch is None:
            batch = make_batch([self._sample(*each) for each in zip(wanted, rows, strict=True)], wanted)
        return batch if len(numbers) else empty_like(batch)

    def _sample(self, number: int, row: Row) -> Any:
        try:
            return self._columns.sample(row)
        except (ValueError, OverflowError) as error:
            raise DamagedSample(self.sample_key(number), str(error), where=self._database.url) from error

    def sample_key(self, number: int) -> str:
        """The key of a sample's row."""
        return self._named(self._index.rows([number])[0].key)

    def _named(self, key: Any) -> str:
        return f"{self._columns.key} = {key!r}"

    def _digested(self) -> Iterator[tuple[Any, int]]:
        for row in self._database.scan():
            yield row[self._columns.key_place], row_digest(row)

    def _read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these samples. Raises DamagedSample for one that is not as it was."""
        indexed, place = self._index.rows(numbers), self._columns.key_place
        by_key = {row[place]: row for row in self._query([each.key for each in indexed])}
        found = []
        for key, digest in indexed:
            row = by_key.get(key)
            if row is None or row_digest(row) != digest:
                reason = f"its row {'is gone' if row is None else 'has changed'} since the keys were read"
                raise DamagedSample(self._named(key), reason, where=self._database.url)
            found.append(row)
        return found

    def _query(self, keys: Sequence[Any]) -> list[Row]:
        return self._retry(lambda: self._database.rows(keys))

    def _retry(self, read: Callable[[], Result]) -> Result:
        return retried(self._database, read, self._backoff)
