"""Token rows: documents of different lengths, packed into rows of one length (sequence packing).

document  a sequence of n ≥ 2 tokens: n − 1 inputs, each with the next token as its target
piece     a document, or [length] of its inputs if it is longer than a row; then each piece counts as a document
row       a sample: pieces laid end to end, with padding behind them
start     the position in its row of the first token of a token's document
Law: each pair of an input and its target is in one row once; each token's position counts from its document's start.
So training on rows equals training on documents, if attention stays within documents (`ff.DocumentMask`).

Rows are filled best fit first: a piece goes into that of NUM_OPEN_ROWS rows in which it leaves the least room.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fourfold.words import argument_checks
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem

NUM_OPEN_ROWS = 64
IGNORED_TARGET = -100  # torch's cross_entropy ignores it
TOKEN_KEYS = ("tokens", "input_ids", "text")
WHERE = "token rows"


@dataclass(eq=False)
class _OpenRow:
    """A row with room for more. `pieces`: of n + 1 tokens each, n inputs and n targets."""

    room: int
    pieces: list[np.ndarray] = field(default_factory=list)


class TokenRows:
    """An iterable of rows, for `ff.pack`: ({"tokens", "positions", "document_starts"}, targets), each int64 [length].

    documents  any iterable of documents: whole numbers (a tensor, array or list); text or bytes, which are the tokens 0
               to 255; or dicts with one of these under "tokens", "input_ids" or "text"
    length     tokens of a row
    Padding has the target −100 and is a document of its own.

    num_tokens, num_padding, num_short   of the rows so far: tokens with a target; tokens without; documents of fewer
               than two tokens, which are left out
    Raises DataError, with the number of the document, for one that is no tokens.
    """

    def __init__(self, documents: Iterable[Any], length: int) -> None:
        problems = argument_checks.int_problems("length", length, minimum=1)
        if not isinstance(documents, Iterable) and not hasattr(documents, "__getitem__"):
            got = argument_checks.format_argument("documents", documents)
            problems.append(Problem(got, "an iterable of documents", "a list of token arrays"))
        if problems:
            raise DataError(problems, where=WHERE)
        self._documents, self.length = documents, int(length)
        self.num_tokens = self.num_padding = self.num_short = 0

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        self.num_tokens = self.num_padding = self.num_short = 0
        open_rows: list[_OpenRow] = []
        for piece in self._pieces():
            size = len(piece) - 1
            fitting = [row for row in open_rows if row.room >= size]
            if not fitting and len(open_rows) == NUM_OPEN_ROWS:
                yield self._close(min(open_rows, key=_room), open_rows)
            if fitting:
                row = min(fitting, key=_room)
            else:
                row = _OpenRow(self.length)
                open_rows.append(row)
            row.pieces.append(piece)
            row.room -= size
            if not row.room:
                yield self._close(row, open_rows)
        while open_rows:
            yield self._close(open_rows[0], open_rows)

    def _pieces(self) -> Iterator[np.ndarray]:
        for number, document in enumerate(self._documents):
            tokens = _tokens(document, number)
            self.num_short += len(tokens) < 2
            for start in range(0, len(tokens) - 1, self.length):
                yield tokens[start : start + self.length + 1]

    def _close(self, row: _OpenRow, open_rows: list[_OpenRow]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        open_rows.remove(row)
        self.num_tokens += self.length - row.room
        self.num_padding += row.room
        return _join(row.pieces, self.length)


_room = operator.attrgetter("room")


def _join(pieces: list[np.ndarray], length: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    tokens, positions, starts = (np.zeros(length, np.int64) for _ in range(3))
    targets, begin = np.full(length, IGNORED_TARGET, np.int64), 0
    for piece in pieces:
        stop = begin + len(piece) - 1
        tokens[begin:stop], targets[begin:stop] = piece[:-1], piece[1:]
        positions[begin:stop], starts[begin:stop] = np.arange(stop - begin), begin
        begin = stop
    positions[begin:], starts[begin:] = np.arange(length - begin), begin
    return {"tokens": tokens, "positions": positions, "document_starts": starts}, targets


def _tokens(document: Any, number: int) -> np.ndarray:
    """The tokens of a document: int64 [n]."""
    if isinstance(document, Mapping):
        keys = [key for key in TOKEN_KEYS if key in document]
        if len(keys) != 1:
            got = f"document {number}: a dict of {comma_list(document) or 'nothing'}"
            raise DataError(Problem(got, f"one of {', '.join(TOKEN_KEYS)} in it", "{'tokens': …}"), where=WHERE)
        document = document[keys[0]]
    if isinstance(document, str):
        document = document.encode()
    if isinstance(document, bytes):
        return np.frombuffer(document, np.uint8).astype(np.int64)
    values = document.numpy() if isinstance(document, Tensor) else _as_array(document)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu") or (values < 0).any():
        kind = f"{values.dtype} {list(values.shape)}" if values.dtype.kind in "iufb" else type(document).__name__
        need = "tokens: whole numbers from 0 in one dim, text or bytes"
        raise DataError(Problem(f"document {number}: {kind}", need, "an int64 array of token ids"), where=WHERE)
    return values.astype(np.int64)


def _as_array(document: Any) -> np.ndarray:
    try:
        values = np.asarray(document)
    except ValueError:  # a list of lists of different lengths
        return np.empty((0, 0), object)
    return values if values.dtype.kind in "iufb" else np.empty((0, 0), object)
