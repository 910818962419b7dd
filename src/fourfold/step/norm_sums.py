"""Norm sums: squared norms of whole parameters, of which each rank has an addend.

Law: all ranks that hold a weight get the same bits.
"""

from typing import Protocol

import torch
from torch import Tensor

from fourfold.comm.reduce.protocol import GradReducer, ScalarReducer, shard_addend
from fourfold.comm.tensor.protocol import TensorGroup
from fourfold.words.program import TRUST_NORMS


class NormSum(Protocol):
    """Sums squared norms over the ranks that hold parts of the same parameters."""

    def over_ranks(self, addends: Tensor) -> Tensor:
        """[n], float64 -> the sums. Collective."""
        ...


class SumOverTensorRanks:
    """See `NormSum`; of data ranks that each hold all that their place of the tensor axis has of a parameter."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def over_ranks(self, addends: Tensor) -> Tensor:
        # Each rank adds in rank order: data ranks must get the same bits, also where the tensor ranks of one are joined
        # by another transport.
        return self._group.all_gather(addends.unsqueeze(0), 0).sum(0)


class SumOverShards:
    """See `NormSum`; of data ranks that each update a shard."""

    def __init__(self, scalars: ScalarReducer, reducer: GradReducer, over_tensor_ranks: NormSum) -> None:
        self._scalars, self._reducer, self._over_tensor_ranks = scalars, reducer, over_tensor_ranks

    def over_ranks(self, addends: Tensor) -> Tensor:
        self._scalars.all_reduce_async(TRUST_NORMS, shard_addend(self._reducer, addends))
        of_place = torch.tensor(self._scalars.wait(TRUST_NORMS), dtype=addends.dtype, device=addends.device)
        return self._over_tensor_ranks.over_ranks(of_place)
