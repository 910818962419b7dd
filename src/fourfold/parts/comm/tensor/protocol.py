"""Tensor groups: the ranks of one place on all other axes, which hold the parts of the same weights.

They call the same collectives on activations and their gradients, in the same order, within a forward or a backward.
Law: sums are added in rank order, so all ranks of a group hold bitwise equal results.
"""

from typing import Protocol

from torch import Tensor

from fourfold.parts.comm.meter import CommMeter


class TensorGroup(Protocol):
    """This rank's view of the group. All methods are collective, on tensors of the same shape and dtype, and wait."""

    name: str
    size: int
    index: int
    meter: CommMeter
    """That of this rank: it counts and records what the group sends and waits for."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, contiguous; `tensor` may be overwritten, and may be the result."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over the ranks; `tensor` may be overwritten, and may be the result."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, one behind the other along `dim`, contiguous."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's equal slice along `dim` of the sum over the ranks, contiguous. The size divides the dim."""
        ...
