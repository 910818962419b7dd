"""Whole tensors: tensors as large as the parameters, made of the parts of all tensor ranks, or cut into them.

local  what this rank's place of the tensor axis holds: the parameter of its model, or a tensor as large as that
Law: `local(name, whole(name, tensor))` is the tensor, bit for bit. Of a piece that several places hold, the first
one's is taken. A parameter that has no shards is whole at every place.
Law: a range of the local tensor is read as the parts of the whole one that it is; nothing else is read.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fourfold.axes.tensor.work.layers import local_part
from fourfold.comm.communicator import Communicator
from fourfold.plan.checkpoint_boxes import Part, Shape
from fourfold.plan.param_spec import TensorShard
from fourfold.plan.shard_ranges import Rows, held_ranges
from fourfold.torch_kit.tensor_reader import TensorReader, part_of
from fourfold.words.ranges import Box

# ---- readers -------------------------------------------------------------------------------------------------------


class ShardReader:
    """A `TensorReader` of a shard, over one of the whole tensor, whose shape may be flat."""

    def __init__(self, whole: TensorReader, shard: TensorShard) -> None:
        self._whole, self._shard = whole, shard

    @property
    def shape(self) -> Shape:
        return self._shard.local_shape

    @property
    def dtype(self) -> torch.dtype:
        return self._whole.dtype

    def read(self, start: int, stop: int) -> Tensor:
        found = [
            (each.rows, self._whole.read_part(each.part, self._shard.shape))
            for each in held_ranges(self._shard, start, stop)
        ]
        if len(found) == 1:  # all of the range
            return found[0][1]
        result = torch.empty(stop - start, dtype=self.dtype)
        for rows, elements in found:
            offset = 0
            for view in row_views(result, rows):
                view.copy_(elements[offset : offset + view.numel()].view(view.shape))
                offset += view.numel()
        return result

    def read_part(self, part: Part, shape: Shape) -> Tensor:
        return part_of(self.read(0, self._shard.num_elements).view(shape), part)


def row_views(flat: Tensor, rows: Sequence[Rows]) -> list[Tensor]:
    """Views of rows in a flat, each [length], or [rows, length] where there are several."""
    return [
        flat[start : start + length]
        if count == 1
        else flat[start : start + (count - 1) * stride + length].unfold(0, length, stride)
        for start, count, length, stride in rows
    ]


# ---- whole tensors -------------------------------------------------------------------------------------------------


class WholeTensors:
    """By parameter name: whole tensors of the local ones, and the reverse."""

    def __init__(self, all_shards: Mapping[str, Sequence[TensorShard]], ranks: Communicator) -> None:
        """`all_shards`: by parameter the shards of all places; `ranks`: those that lie along the tensor axis."""
        self._split = {
            name: shards for name, shards in all_shards.items() if not all(shard.is_whole for shard in shards)
        }
        self._all_shards, self.ranks = all_shards, ranks

    def is_split(self, name: str) -> bool:
        """Whether this rank holds a part of the parameter."""
        return name in self._split

    def shard(self, name: str, local_shape: Sequence[int]) -> TensorShard:
        """What this place holds of a parameter, whose local tensor has this shape."""
        shards = self._all_shards.get(name)
        return shards[self.ranks.rank] if shards else TensorShard.whole(local_shape)

    def shape(self, name: str, local_shape: Sequence[int]) -> Shape:
        """The shape of the whole parameter, whose local tensor has this shape."""
        return self.shard(name, local_shape).shape

    @torch.no_grad()
    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor, of which this place has `local`; that itself if it is not split. Collective."""
        shards = self._split.get(name)
        if shards is None:
            return local
        local = local.detach().to(self.ranks.device).view(shards[self.ranks.rank].local_shape)
        result = local.new_empty(shards[0].shape)
        for place, shard in enumerate(shards):
            if not shard.num_elements or all(piece.replica for piece in shard.pieces):
                continue
            part = local if place == self.ranks.rank else local.new_empty(shard.local_shape)
            self.ranks.broadcast(part, place)
            for piece, box, own in zip(shard.pieces, shard.boxes, shard.local_boxes, strict=True):
                if not piece.replica:
                    result[_slices(box)] = part[_slices(own)]
        return result

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This place's part of a whole tensor: a copy, or the tensor itself if it is not split."""
        shards = self._split.get(name)
        return whole if shards is None else local_part(whole.detach(), shards[self.ranks.rank])

    def reader(self, name: str, whole: TensorReader) -> TensorReader:
        """A reader of this place's part of a whole saved tensor."""
        shards = self._split.get(name)
        return whole if shards is None else ShardReader(whole, shards[self.ranks.rank])

    def all_true(self, value: bool) -> bool:
        """Whether it is true at all places. Collective."""
        return all(self.ranks.all_gather_json(value))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(*box, strict=True))
