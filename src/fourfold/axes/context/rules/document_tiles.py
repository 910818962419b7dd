"""Document tiles: the attention scores of packed documents, each query attending to its own document alone.

span  consecutive tokens of a rank that are of one document: where the document starts in the row, and how many they are
Law: the tiles of a rank's queries and all keys hold each pair (query, key) with start of document ≤ key ≤ query once,
and no other. So their number of scores is the sum over documents of the squares of their lengths, not of the row's.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fourfold.axes.context.rules.layout import Tile, TokenRange, TokenRanges, local_ranges


class DocumentSpan(NamedTuple):
    """`num_tokens` consecutive local tokens of the document that starts at this position of the row."""

    start: int
    num_tokens: int


class _QueryRun(NamedTuple):
    """Queries of one document and one token range: [start, stop) in the row, and in local order."""

    document_start: int
    tokens: TokenRange
    rows: TokenRange


def document_tiles(queries: TokenRanges, keys: TokenRanges, spans: Sequence[DocumentSpan]) -> Iterator[Tile]:
    """The tiles of a rank with these queries, whose documents are `spans`, against a block of keys.

    Token ranges are as in `tiles` of `layout.py`: those of queries and keys are equal or disjoint.
    """
    for document_start, (start, stop), (first, last) in _query_runs(queries, spans):
        earlier: TokenRange | None = None
        for (key_start, key_stop), (column, _) in local_ranges(keys):
            low, high = max(key_start, document_start), min(key_stop, start)
            if low < high:
                columns = (column + low - key_start, column + high - key_start)
                is_next = earlier is not None and earlier[1] == columns[0]
                if earlier is not None and not is_next:
                    yield Tile((first, last), earlier, False)
                earlier = (earlier[0], columns[1]) if earlier is not None and is_next else columns
            if key_start <= start < key_stop:
                square = (column + start - key_start, column + stop - key_start)
                yield Tile((first, last), square, True)
        if earlier is not None:
            yield Tile((first, last), earlier, False)


def _query_runs(queries: TokenRanges, spans: Sequence[DocumentSpan]) -> Iterator[_QueryRun]:
    pending = list(reversed(spans))
    for (start, stop), (row, _) in local_ranges(queries):
        at = start
        while at < stop:
            span = pending.pop()
            count = min(span.num_tokens, stop - at)
            if count < span.num_tokens:  # its other tokens are in the next token range
                pending.append(DocumentSpan(span.start, span.num_tokens - count))
            yield _QueryRun(span.start, (at, at + count), (row + at - start, row + at + count - start))
            at += count
