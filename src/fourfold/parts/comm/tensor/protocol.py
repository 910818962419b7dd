"""Tensor groups: the ranks of one place on all other axes, which hold the parts of the same weights.

They call the same collectives on activations and their gradients, in the same order, within a forward or a backward.
Law: all ranks of a group hold bitwise equal results. Between processes of one host sums are added in rank order, and
sums of half precision are rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.parts.comm.meter import CommMeter


class TensorGroup(Protocol):
    """This rank's view of the group. All methods but `buffer` are collective, on tensors of the same shape and dtype.

    They wait, and their results are contiguous and carry no gradient. All raise PeerError if a rank has died; where
    ranks share memory, DivergenceError if they differ in the collective, the dtype or the number of bytes.
    """

    name: str
    size: int
    index: int
    meter: CommMeter
    """That of this rank: it counts and records what the group sends and waits for."""

    def meet(self, call: str) -> None:
        """Begin a call that one rank might make alone. Raises DivergenceError, on all ranks, if others begin another.

        Where ranks share memory, each collective compares; over messages, ranks in different ones would wait or die.
        """
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with undefined values, for the input of the next collective, which then copies nothing.

        Where ranks share memory, peers read it where it lies. It may be used until the next collective of the group.
        """
        ...

    def num_chunks(self, num_bytes: int) -> int:
        """Into how many chunks a product is best cut, so that the sum of one travels while the next one is computed.

        1 where sums do not travel beside computation, or where so few bytes would travel slower in chunks.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks; `tensor` may be overwritten, and may be the result."""
        ...

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum over the ranks; the returned function waits, and returns the sum.

        Until then `tensor` may be neither read nor written, and the group does nothing else.
        """
        ...

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, NaN where a rank has NaN; `tensor` may be overwritten or returned."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, one behind the other along `dim`."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's equal slice along `dim` of the sum over the ranks. The size divides the dim."""
        ...
