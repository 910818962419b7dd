"""Whole tensors: tensors as large as the parameters, made of the parts of all tensor ranks, or cut into them.

local  what this rank's place of the tensor axis holds: the parameter of its model, or a tensor as large as that
Law: `local(name, whole(name, tensor))` is the tensor, bit for bit. Of a piece that several places hold, the first
one's is taken. A parameter that has no shards is whole at every place.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fourfold.axes.tensor.work.cut import local_part
from fourfold.axes.tensor.work.shard_reader import ShardReader
from fourfold.comm.communicator import Communicator
from fourfold.plan.tensor_shard import TensorShard
from fourfold.torch_kit.tensor_reader import TensorReader
from fourfold.words.box import Box

Shape = tuple[int, ...]


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
