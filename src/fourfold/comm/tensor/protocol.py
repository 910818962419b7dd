"""Tensor groups: the collectives of the tensor axis, on activations and their gradients.

call    in words, such as "step 2"; a second line may have the optimizer's options. In a checked group what a rank
        begins: a collective on a tensor of some shape and dtype, or its last one, which ends the calls
digest  a number that goes with it, of a batch for example
Law: the ranks of a group call the same collectives in the same order, within a forward or a backward, and hold bitwise
equal results.
Law: between processes of one host sums are added in rank order; half precision is added in float32 and rounded once.
`out` may be one of two parts, else it shares no memory with them.
Law: the collective that compares calls is the same for all calls. So ranks in different calls meet in it, over shared
memory and over messages, and raise DivergenceError; those of a checked group raise CallMismatch, at the same call.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.comm.channel import Channel
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.divergence_report import divergence_error

# ---- what a tensor group does --------------------------------------------------------------------------------------


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


# ---- rank order ----------------------------------------------------------------------------------------------------

Combine = Callable[[Sequence[Tensor], Tensor], None]
HALF = (torch.bfloat16, torch.float16)


def add_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Into `out`: the sum of two parts or more."""
    if len(parts) > 2 and out.dtype in HALF:
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)  # of two halves: computed in float32, by torch
    for part in parts[2:]:
        out.add_(part)


def max_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Into `out`: the elementwise maximum of two parts or more, NaN where one has NaN."""
    torch.maximum(parts[0], parts[1], out=out)
    for part in parts[2:]:
        torch.maximum(out, part, out=out)


# ---- one rank ------------------------------------------------------------------------------------------------------


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


# ---- checked -------------------------------------------------------------------------------------------------------

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


# ---- call check ----------------------------------------------------------------------------------------------------

NO_DIGEST = 0

CALL_ROW = 2  # elements: of the call and of the batch


def compare_calls(group: TensorGroup, ranks: Communicator, call: str, digest: int = NO_DIGEST) -> list[int]:
    """The digests of all ranks. Collective. Raises DivergenceError if they are in different calls.

    ranks  those of the group
    """
    return _compare_rows(group.all_gather(_row(ranks, call, digest)[None], 0), ranks, call)


def compare_calls_of_stages(rows: Channel, ranks: Communicator, call: str, digest: int) -> list[int]:
    """The same of the ranks that have the stages of one model. `rows`: their exchange."""
    return _compare_rows(torch.stack(list(rows.all_gather_rows(_row(ranks, call, digest)))), ranks, call)


def _row(ranks: Communicator, call: str, digest: int) -> Tensor:
    """int64 [CALL_ROW]"""
    return torch.tensor([zlib.crc32(call.encode()), digest], device=ranks.device)


def _compare_rows(rows: Tensor, ranks: Communicator, call: str) -> list[int]:
    """The digests in the rows [rank, 2]. Raises DivergenceError, for which ranks in different calls tell these."""
    calls, digests = rows.T.tolist()
    if len(set(calls)) > 1:
        raise divergence_error(dict(zip(ranks.ranks, ranks.all_gather_json(call), strict=True)))
    return digests
