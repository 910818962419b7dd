"""Checked tensor group: before each collective, its ranks tell each other which one they begin.

call  what a rank begins: a collective on a tensor of some shape and dtype, or its last one, which ends the calls
Law: ranks whose calls differ raise CallMismatch, all of them at the same call, and none waits for another.
"""

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.tensor.protocol import TensorGroup

FINISHED, FAILED = -1, -2


class CallMismatch(Exception):
    """The ranks of a group are in different calls, or one of them has failed."""


class CheckedTensorGroup:
    """See `TensorGroup`: the same collectives, checked. `device`: where the ranks' calls are compared."""

    def __init__(self, group: TensorGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.name, self.size, self.index, self.meter = group.name, group.size, group.index, group.meter
        self._is_over = False

    def meet(self, call: str) -> None:
        self.agree(call)

    def num_chunks(self, num_bytes: int) -> int:
        return self._group.num_chunks(num_bytes)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.agree(_call("all_reduce", tensor))
        return self._group.all_reduce(tensor)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Of its own: comparing the calls is a collective that comes before the one that would read it.
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.agree(_call("all_reduce", tensor))
        return self._group.all_reduce_async(tensor)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        self.agree(_call("all_reduce_max", tensor))
        return self._group.all_reduce_max(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.agree(_call(f"all_gather {dim}", tensor))
        return self._group.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.agree(_call(f"reduce_scatter {dim}", tensor))
        return self._group.reduce_scatter(tensor, dim)

    def agree(self, call: str) -> None:
        """Begin a call. Collective. Raises CallMismatch if another rank begins a different one."""
        self._compare(zlib.crc32(call.encode()))

    def finish(self, *, has_failed: bool) -> None:
        """End the calls of this rank, once. Collective. Raises CallMismatch if another rank is not at its end."""
        if not self._is_over:
            self._compare(FAILED if has_failed else FINISHED)
            self._is_over = True

    def _compare(self, code: int) -> None:
        if self._is_over:  # Other ranks have left: nobody would answer.
            raise CallMismatch
        codes = self._group.all_gather(torch.tensor([code], device=self._device), 0).tolist()
        if len(set(codes)) > 1:
            self._is_over = True
            raise CallMismatch


def _call(kind: str, tensor: Tensor) -> str:
    return f"{kind} {list(tensor.shape)} {tensor.dtype}"
