"""Shard readers: the local tensor of a place of the tensor axis, read from a whole saved tensor.

Law: a range of the local tensor is read as the parts of the whole one that it is; nothing else is read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.plan.checkpoint_boxes import Part, Shape
from fourfold.plan.shard_ranges import Rows, held_ranges
from fourfold.plan.tensor_shard import TensorShard
from fourfold.torch_kit.tensor_reader import TensorReader, part_of


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
