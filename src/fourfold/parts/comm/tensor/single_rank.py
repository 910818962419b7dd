"""The tensor group of one rank: nothing is sent."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.meter import CommMeter


class SingleRankTensorGroup:
    """See `TensorGroup`."""

    name, size, index = "one rank", 1, 0

    def __init__(self, meter: CommMeter, device: torch.device) -> None:
        self.meter, self._device = meter, device

    def meet(self, call: str) -> None:
        pass

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def num_chunks(self, num_bytes: int) -> int:
        return 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        return tensor.contiguous

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.contiguous()

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.contiguous()
