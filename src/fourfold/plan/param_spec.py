"""Parameter specs: the identity of a parameter, by which buckets, checkpoints, averages, `show` and `verify` speak.

name, shape  of the global tensor: the same on every rank and every mesh
shard        the part of it that a place of the tensor axis holds; the ranks of one place hold the same
Law: everything that is known about a parameter without its values is here, and nothing here depends on the data axis.
Law: plain data, so that code with torch can describe the optimizer to code without it.

Tensor shards: the part of a parameter that one place of the tensor axis holds.

dim      the dim of the parameter that the tensor axis splits
piece    a range of that dim. A fused weight has several: a shard of `qkv` is some rows of q, of k and of v
local    the tensor that a rank holds: its pieces, one behind the other along `dim`
replica  a piece that several places hold: which of them this one is. A whole parameter is one piece that all hold
Law: the pieces of all places, each replicated one counted once, tile the parameter.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from fourfold.words.ranges import Box, join_ranges

# ---- tensor shard ----------------------------------------------------------------------------------------------------


class ShardPiece(NamedTuple):
    """A range [start, stop) of the split dim, and which of `num_replicas` places that hold it this one is."""

    start: int
    stop: int
    replica: int = 0
    num_replicas: int = 1

    @property
    def length(self) -> int:
        return self.stop - self.start


class TensorShard(NamedTuple):
    """The part of a parameter of `shape` that one place of the tensor axis holds.

    shape   of the whole parameter
    dim     the dim that is split
    pieces  the ranges of that dim which are here, in the order in which the local tensor has them
    """

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[ShardPiece, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], index: int = 0, size: int = 1) -> Self:
        """All of a parameter, which place `index` of `size` holds as all others do."""
        length = shape[0] if shape else 1
        return cls(tuple(shape), 0, (ShardPiece(0, length, index, size),))

    @classmethod
    def even(cls, shape: Sequence[int], dim: int, index: int, size: int) -> Self:
        """Slice `index` of `size` of one dim; the last ones are shorter where it does not divide."""
        share = -(-shape[dim] // size)
        start = min(index * share, shape[dim])
        return cls(tuple(shape), dim, (ShardPiece(start, min(start + share, shape[dim])),))

    @property
    def is_whole(self) -> bool:
        """Whether this place holds all of the parameter."""
        return self.local_shape == self.shape and len(self.pieces) == 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this place holds."""
        if not self.shape:
            return ()
        length = sum(piece.length for piece in self.pieces)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def num_elements(self) -> int:
        """The elements that this place holds."""
        return math.prod(self.local_shape)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The pieces as boxes of the whole parameter."""
        if not self.shape:
            return (Box((), ()),)
        return tuple(self._box(piece.start, piece.length) for piece in self.pieces)

    @property
    def local_boxes(self) -> tuple[Box, ...]:
        """The pieces as boxes of the local tensor, in the order of `boxes`."""
        if not self.shape:
            return (Box((), ()),)
        result, start = [], 0
        for piece in self.pieces:
            result.append(self._box(start, piece.length))
            start += piece.length
        return tuple(result)

    def _box(self, start: int, length: int) -> Box:
        offsets, lengths = [0] * len(self.shape), list(self.shape)
        offsets[self.dim], lengths[self.dim] = start, length
        return Box(tuple(offsets), tuple(lengths))

    @property
    def element_ranges(self) -> Iterator[tuple[int, int]]:
        """The elements [start, stop) of the flattened parameter, in the order of the flattened local tensor.

        A range ends where the next one does not follow: rows of a matrix are one range, columns one in each row.
        """
        outer, inner = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 :])
        row, last = (self.shape[self.dim] if self.shape else 1) * inner, (0, 0)
        for first in range(0, outer * row, row or 1):
            for piece in self.pieces:
                start, stop = first + piece.start * inner, first + piece.stop * inner
                if start == last[1]:
                    last = (last[0], stop)
                    continue
                if last[0] < last[1]:
                    yield last
                last = (start, stop)
        if last[0] < last[1]:
            yield last

    @property
    def uncounted_ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements [start, stop) of the flattened local tensor that another place counts in sums over places."""
        outer, inner = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 :])
        row = sum(piece.length for piece in self.pieces) * inner
        ranges, offset = [], 0
        for piece in self.pieces:
            length = piece.length * inner
            if piece.replica and length:
                ranges += [(each * row + offset, each * row + offset + length) for each in range(outer)]
            offset += length
        return tuple(join_ranges(ranges))


# ---- update spec ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateSpec:
    """How gradients are clipped, and what the optimizer is.

    optimizer              the name of its class
    is_layerwise           its update needs the norms of whole parameters
    num_states             by parameter group: tensors of optimizer state per parameter; needed to count memory
    full_precision_params  the parameters that are computed and updated in their own dtype, whatever the precision
    """

    clip: float | None = None
    optimizer: str = "the optimizer"
    is_layerwise: bool = False
    num_states: tuple[int, ...] = ()
    full_precision_params: frozenset[str] = frozenset()

    def waits_for_norm(self, precision: str) -> bool:
        """Whether updates wait for the norm of all gradients: for a clip, or to know whether they are finite."""
        return self.clip is not None or precision == "fp16"


# ---- parameter specs -----------------------------------------------------------------------------------------------


class ParamSpec(NamedTuple):
    """A parameter of the model.

    name           in the whole model, as `named_parameters` has it
    shape          of the global tensor
    dtype          by its name in torch
    param_group    the index of its optimizer group
    stage          the pipeline stage that computes with it
    shards         by place on the tensor axis: the part of the global tensor that its ranks hold, before the data axis
                   shards it; empty: every place holds all of it
    is_tied        another pipeline stage has a copy of it
    tensor_index   the place that `local_shape`, `num_elements` and `num_bytes` are of
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    param_group: int = 0
    stage: int = 0
    shards: tuple[TensorShard, ...] = ()
    tensor_index: int = 0
    is_tied: bool = False

    def at(self, tensor_index: int) -> Self:
        """The same parameter, as the ranks of this place on the tensor axis hold it."""
        return self._replace(tensor_index=tensor_index)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that a rank holds."""
        return self.shards[self.tensor_index].local_shape if self.shards else self.shape

    @property
    def num_replicas(self) -> int | None:
        """How many places of the tensor axis hold each element; None: more of some elements than of others."""
        counts = {piece.num_replicas for shard in self.shards for piece in shard.pieces} or {1}
        return counts.pop() if len(counts) == 1 else None

    @property
    def num_elements(self) -> int:
        """The elements that a rank holds."""
        return math.prod(self.local_shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the elements that a rank holds."""
        return self.num_elements * self.element_bytes
