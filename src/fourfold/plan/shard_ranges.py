"""Shard ranges: which elements of a whole parameter a range of a tensor shard is, and where these lie in the range.

range   elements [start, stop) of the flattened local tensor: what a rank holds where the data axis splits it further
rows    pieces of several fused parts alternate in the local tensor: those of one piece are rows, a stride apart
stored  a piece that several places hold is stored in equal slices, one by each place
Law: the elements of a range that one piece has follow each other in the piece's own order, so each piece has one part.
The stored ranges of all places tile the parameter, however each place divides its local tensor.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from fourfold.plan.checkpoint_boxes import Part
from fourfold.plan.param_spec import ShardPiece, TensorShard
from fourfold.words.ranges import Box


class Rows(NamedTuple):
    """`num_rows` rows of `length` elements, `stride` apart; the first begins at `start`, counted from the range's."""

    start: int
    num_rows: int
    length: int
    stride: int


class ShardRange(NamedTuple):
    """What a range of a shard has of one piece.

    piece  the number of the piece in the shard
    part   these elements of the whole parameter
    rows   where they lie in the range, in their order
    """

    piece: int
    part: Part
    rows: tuple[Rows, ...]


def held_ranges(shard: TensorShard, start: int, stop: int) -> list[ShardRange]:
    """What elements [start, stop) of the flattened local tensor are, piece by piece."""
    return [each for piece in _pieces(shard) if (each := piece.between(start, stop, 0, piece.num_elements))]


def stored_ranges(shard: TensorShard, start: int, stop: int) -> list[ShardRange]:
    """Those elements of [start, stop) that this place stores: of a piece that others hold too, its slice only."""
    if not math.prod(shard.shape):  # A parameter without elements is stored by the first place.
        is_first = shard.pieces[0].replica == 0
        return [ShardRange(0, Part(Box.whole(shard.shape), 0, 0), ())] if is_first else []
    found = []
    for piece in _pieces(shard):
        replica, count = piece.held.replica, piece.held.num_replicas
        low, high = piece.num_elements * replica // count, piece.num_elements * (replica + 1) // count
        if each := piece.between(start, stop, low, high):
            found.append(each)
    return found


class _Piece(NamedTuple):
    """A piece in the flattened local tensor: in each row of `row` elements, `length` of them from `offset` on."""

    number: int
    held: ShardPiece
    box: Box
    offset: int
    length: int
    row: int

    @property
    def num_elements(self) -> int:
        return self.box.num_elements

    def between(self, start: int, stop: int, low: int, high: int) -> ShardRange | None:
        """What local elements [start, stop) have of the piece's own elements [low, high); None if there are none."""
        first, last = (min(max(self._num_before(each), low), high) for each in (start, stop))
        if first >= last:
            return None
        return ShardRange(self.number, Part(self.box, first, last), tuple(self._rows(first, last, start)))

    def _num_before(self, local: int) -> int:
        """How many elements of the piece lie before a local element."""
        full_rows, rest = divmod(local, self.row)
        return full_rows * self.length + min(max(rest - self.offset, 0), self.length)

    def _rows(self, first: int, last: int, start: int) -> Iterator[Rows]:
        """Where elements [first, last) of the piece lie, from local element `start` on."""
        if self.length == self.row:
            yield Rows(first - start, 1, last - first, last - first)
            return
        while first < last:
            index, column = divmod(first, self.length)
            count = 1 if column or last - first < self.length else (last - first) // self.length
            length = min(self.length - column, last - first)
            yield Rows(index * self.row + self.offset + column - start, count, length, self.row)
            first += count * length


def _pieces(shard: TensorShard) -> Iterator[_Piece]:
    """The pieces of a shard that have elements."""
    inner = math.prod(shard.shape[shard.dim + 1 :])
    row, offset = sum(piece.length for piece in shard.pieces) * inner, 0
    for number, (piece, box) in enumerate(zip(shard.pieces, shard.boxes, strict=True)):
        length = piece.length * inner
        if box.num_elements:
            yield _Piece(number, piece, box, offset, length, row)
        offset += length
